"""A benchmark that is cut off keeps the figures that it has measured."""

import importlib
import json
import resource
import sys
from pathlib import Path

import pytest
from tiny import save_words


@pytest.mark.parametrize("name", ["update", "sync", "rollout", "memory", "unified_mismatch"])
def test_a_benchmark_that_is_cut_off_keeps_what_it_measured(monkeypatch, tmp_path, name):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    benchmark, asked = importlib.import_module(name), []

    def measured(words: list[str], timeout: float) -> dict:
        asked.append(words[words.index("--one") + 1])
        if len(asked) > 1:
            raise KeyboardInterrupt
        return {"error": "out of memory"}

    monkeypatch.setattr(benchmark, "in_own_process", measured)
    words = ["--output", str(tmp_path / "new")]
    if name == "unified_mismatch":
        (tmp_path / "model").mkdir()
        (tmp_path / "model/model.safetensors").touch()
        words += ["--data", str(tmp_path / "none.jsonl"), "--model", str(tmp_path / "model")]
    if name in ("rollout", "memory"):
        words += ["--tokenizer", str(save_words(tmp_path / "tokenizer.json"))]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(KeyboardInterrupt):
        benchmark.main()
    (path,) = (tmp_path / "new").iterdir()
    found = json.loads(path.read_text())
    results = found["results"].get("tiny", found["results"])  # by size, if the benchmark takes several
    assert len(asked) == 2 and results[asked[0]] == {"error": "out of memory"} and asked[1] not in results
    assert found["commit"] and found["versions"]["torch"] and found["machine"]


@pytest.mark.parametrize("name", ["step_runs", "engines"])
def test_a_full_disk_leaves_what_was_measured_before(monkeypatch, tmp_path, name):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    benchmark = importlib.import_module(name)

    def write(runs: list[str]) -> None:
        if name == "engines":
            benchmark.save("figures", {"runs": runs}, tmp_path)
        else:
            benchmark.write({"runs": runs}, tmp_path / "figures.json")

    write(["first"])
    (path,) = tmp_path.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.raises(OSError):
            write(["first", "second"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_text())["runs"] == ["first"] and [*tmp_path.iterdir()] == [path]
