"""A benchmark that is cut off keeps the figures that it has measured."""

import importlib
import json
import lzma
import resource
import sys

import pytest
from figures import RESULTS
from places import ROOT
from raw_results import read_results, write_results
from tiny import save_words


@pytest.mark.parametrize("name", ["update", "sync", "rollout", "memory", "unified_mismatch"])
def test_a_benchmark_that_is_cut_off_keeps_what_it_measured(monkeypatch, tmp_path, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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
    found = read_results(path)
    results = found["results"].get("tiny", found["results"])  # by size, if the benchmark takes several
    assert len(asked) == 2 and results[asked[0]] == {"error": "out of memory"} and asked[1] not in results
    assert found["commit"] and found["versions"]["torch"] and found["machine"]


@pytest.mark.parametrize("name", ["step_runs", "engines"])
def test_a_full_disk_leaves_what_was_measured_before(monkeypatch, tmp_path, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module(name)

    def write(runs: list[str]) -> None:
        if name == "engines":
            benchmark.save("figures", {"runs": runs}, tmp_path)
        else:
            benchmark.write({"runs": runs}, tmp_path / "figures.json.xz")

    write(["first"])
    (path,) = tmp_path.iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.raises(OSError):
            write(["first", "second"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_results(path)["runs"] == ["first"] and [*tmp_path.iterdir()] == [path]


def test_raw_results_are_compressed_by_name_and_always_alike(tmp_path):
    results = {"runs": [{"step": 0.1, "trainer": "fp8/fp8", "é": None}] * 100}
    plain, compressed, again = (tmp_path / name for name in ("runs.json", "runs.json.xz", "other name.json.xz"))
    for path in (plain, compressed, again):
        write_results(path, results, indent=2)
        assert read_results(path) == results
    assert json.loads(plain.read_text()) == results and again.read_bytes() == compressed.read_bytes()
    shown = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(compressed.read_bytes())  # as `xz -dc` does
    assert shown == plain.read_bytes() and 10 * compressed.stat().st_size < len(shown)


def test_every_raw_result_is_stored_compressed():
    files = [path for path in RESULTS.rglob("*") if ".json" in path.suffixes]
    assert len(files) > 70 and {"".join(path.suffixes[-2:]) for path in files} == {".json.xz"}
    for path in files:
        assert read_results(path)
