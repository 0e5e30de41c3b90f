"""The models that benchmarks teach a text: gradients in parts, and the order in which `speculation.py` measures."""

import importlib
import json
import sys
from itertools import pairwise

import pytest
import torch
from figures import read_results
from places import BENCHMARKS
from tiny import save_words, tiny_model


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def reference(model, batch: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over all tokens after the first of each sequence, one by one, and its gradient."""
    losses = []
    for row in batch:
        logits = model(row[None]).logits[0].double()
        losses += [logits[i].logsumexp(0) - logits[i, token] for i, token in enumerate(row[1:].tolist())]
    loss = sum(losses) / len(losses)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True)}


def distance(found: dict, expected: dict) -> float:
    """The relative error of gradients."""
    off = sum((found[name] - grad).double().square().sum() for name, grad in expected.items())
    return float((off / sum(grad.double().square().sum() for grad in expected.values())).sqrt())


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_gradients_in_parts_are_those_of_the_whole_batch(benchmark, monkeypatch, rows):
    """Six sequences: in parts of four and two, and whole. The part that comes last alone would be far away."""
    module = benchmark("unified_mismatch")
    monkeypatch.setattr(module, "CUDA", False)
    model = tiny_model("qwen2").float().train()
    model.gradient_checkpointing_enable()
    batch = torch.randint(300, (6, 12), generator=torch.Generator().manual_seed(0))
    loss, expected = reference(model, batch)
    assert module.add_gradients(model, batch, rows) == pytest.approx(loss, rel=1e-6)
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    assert distance(found, expected) < 1e-5
    _, last = reference(model, batch[4:])
    assert distance(last, expected) > 0.1
    module.add_gradients(model, batch, rows)  # adds to what is there
    assert distance({name: param.grad / 2 for name, param in model.named_parameters()}, expected) < 1e-5


def test_speculation_teaches_both_models_and_measures_the_most_telling_kinds_first(benchmark, monkeypatch, tmp_path):
    """A model that stands there is not taught again. What a run that is cut off has measured is kept."""
    module, asked = benchmark("speculation"), []

    def run(words: list[str], timeout: float) -> dict:
        args = dict(pairwise(words))
        asked.append(args["--one"])
        assert args["--models"] == str(tmp_path / "models")
        if asked[-1] in module.MODELS:
            return {"loss": 1.5, "seconds": 60.0}
        if asked[-1] == "ngram_gpu":
            raise KeyboardInterrupt
        return {"8": {"seconds": [1.0], "tokens": 80}} if asked[-1] == "none" else {"error": "refused"}

    monkeypatch.setattr(module, "in_own_process", run)
    words = ["--data", "none.jsonl", "--models", str(tmp_path / "models"), "--output", str(tmp_path / "new")]
    words += ["--tokenizer", str(save_words(tmp_path / "tokenizer.json")), "--batches", "8", "--kinds", *module.KINDS]
    monkeypatch.setattr(sys, "argv", ["speculation.py", *words])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert asked == ["policy", "drafter", "none", "ngram", "draft", "ngram_gpu"]
    (path,) = (tmp_path / "new").iterdir()
    found = read_results(path)
    assert found["taught"] == {name: {"loss": 1.5, "seconds": 60.0} for name in module.MODELS}
    assert [*found["results"]] == ["none", "ngram", "draft"]

    for name in module.MODELS:
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps({}))
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert asked[0] == "none"


def test_a_model_that_cannot_be_taught_ends_the_run(benchmark, monkeypatch, tmp_path):
    module = benchmark("speculation")
    monkeypatch.setattr(module, "in_own_process", lambda words, timeout: {"error": "CUDA out of memory"})
    monkeypatch.setattr(sys, "argv", ["speculation.py", "--data", "none.jsonl", "--models", str(tmp_path)])
    with pytest.raises(SystemExit, match="the policy was not taught: CUDA out of memory"):
        module.main()
