"""
`trl-quant prepare` with data: AWQ keeps the function and lowers the error of rounding, perplexity is that of
transformers' own reading of the checkpoint, and the model card says what was done.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import warm
from copies import contents
from datasets import Dataset
from long_tests import rest_is_long
from readers import save_reader
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trl_quant.cli import main as command
from trl_quant.storage.layout import dense, quantize_checkpoint, storable
from trl_quant.storage.perplexity import become_quantized, perplexities, perplexity
from trl_quant.storage.text import token_sequences


TEXT = "The quick brown fox jumps over the lazy dog. What is 7 times 6? 42. "
FEW = ["--calibration_samples", "4", "--calibration_length", "64"]


@pytest.fixture(autouse=True)
def as_a_process_of_its_own(monkeypatch):
    """Other tests' engines leave a process group in this process; llmcompressor would have its ranks meet on a GPU."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


def prepare(model, output, *options: str, format: str = "nvfp4") -> Path:
    command(["prepare", "--model", str(model), "--format", format, "--output", str(output), *options])
    return output


def refusal(model, output, *options: str, **kwargs) -> str:
    with pytest.raises(SystemExit) as error:
        prepare(model, output, *options, **kwargs)
    assert not output.exists() and not [path for path in output.parent.iterdir() if path.name.endswith(".part")]
    return str(error.value)


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    return str(tmp_path / "text.txt")


def outliers(path: Path, family: str = "qwen3") -> str:
    """A model whose norms feed a few channels that are 100 times the others, as those of large models do."""
    model = tiny_model(family, tied=False)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::37] *= 100
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def logits(model, sequences) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits for ids in sequences])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


# AWQ


@pytest.mark.parametrize("format", rest_is_long(["nvfp4", "mxfp4", "int4"], "nvfp4", "int4"))
def test_awq_keeps_the_function_and_rounds_better(format, text, tmp_path, monkeypatch):
    pytest.importorskip("llmcompressor")
    from trl_quant.storage import prepared as room

    base, smoothed = outliers(tmp_path / "base"), tmp_path / "smoothed"
    rewrite = room.rewrite_checkpoint

    def keeping(source, *args):
        """Also keeps the 16-bit checkpoint that is quantized."""
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(smoothed)
        rewrite(source, *args)

    monkeypatch.setattr(room, "rewrite_checkpoint", keeping)
    awq = prepare(base, tmp_path / "awq", "--awq", "--calibration", text, *FEW, format=format)
    monkeypatch.undo()
    plain = prepare(base, tmp_path / "plain", format=format)

    original, wide = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (base, smoothed))
    sequences = token_sequences(text, tiny_tokenizer(), 6, 64)
    expected = logits(original, sequences)
    assert difference(logits(wide, sequences), expected) < 1e-5
    moved = [name for name, p in wide.named_parameters() if difference(p, original.get_parameter(name)) > 1e-2]
    assert {name.split(".")[-2] for name in moved} >= {"input_layernorm", "q_proj", "k_proj", "v_proj"}
    assert not any("lm_head" in name or "embed" in name for name in moved)

    errors = []
    for path in (awq, plain):
        model = AutoModelForCausalLM.from_pretrained(base).eval()
        become_quantized(model, path, format)
        errors.append(difference(logits(model, sequences), expected))
    assert errors[0] < 0.9 * errors[1], errors

    # The layout and the codes are those of any prepared checkpoint of the smoothed weights
    assert (tmp_path / "awq/config.json").read_text() == (tmp_path / "plain/config.json").read_text()
    again = load_file(quantize_checkpoint(smoothed, tmp_path / "again", format) / "model.safetensors")
    written = load_file(awq / "model.safetensors")
    assert written.keys() == again.keys() == load_file(plain / "model.safetensors").keys()
    assert all(torch.equal(written[n].view(torch.uint8), again[n].view(torch.uint8)) for n in written)
    if format == "nvfp4":
        layer = "model.layers.0.self_attn.{}_proj.weight_global_scale"
        q, k, v, o = (written[layer.format(x)] for x in "qkvo")
        assert torch.equal(q, k) and torch.equal(q, v) and not torch.equal(q, o)
    name = "model.layers.0.mlp.gate_proj.weight"
    numbers = dense(format, torch.float32)(written)[name]
    assert 2 * difference(numbers, wide.get_parameter(name)) < difference(numbers, original.get_parameter(name))


NORMS = {
    "gemma2": "model.layers.0.pre_feedforward_layernorm.weight",
    "qwen3_5": "model.language_model.layers.0.input_layernorm.weight",  # which feeds linear attention
}


@pytest.mark.parametrize("family", rest_is_long(NORMS))
def test_awq_of_norms_that_store_the_gain_minus_one(family, text, tmp_path):
    pytest.importorskip("llmcompressor")
    if family == "qwen3_5":  # as published, with a tower
        base = save_reader(tmp_path / "base", family, torch.float32)
    else:
        base = save_tiny(tmp_path / "base", family)
    awq = prepare(base, tmp_path / "awq", "--awq", "--calibration", text, *FEW)
    card = (awq / "README.md").read_text()
    change = float(card.split("logits changed by ")[1].split()[0])
    assert 0 < change < 1e-5
    before, after = load_file(f"{base}/model.safetensors"), load_file(awq / "model.safetensors")
    assert difference(after[NORMS[family]], before[NORMS[family]]) > 1e-2


def test_awq_of_a_state_space_model(text, tmp_path):
    pytest.importorskip("llmcompressor")
    text = refusal(save_tiny(tmp_path / "base", "falcon_h1"), tmp_path / "awq", "--awq", "--calibration", text)
    assert "`--awq` scales all layers that a norm feeds" in text


@pytest.mark.long
def test_a_killed_calibration_is_not_repeated(text, tmp_path):
    """The smoothed weights are kept; the result is that of an unbroken run."""
    pytest.importorskip("llmcompressor")
    base = save_tiny(tmp_path / "base")
    code = (
        "import os, signal, sys\n"
        "from trl_quant.cli import main\n"
        "from trl_quant.storage import prepared\n"
        "if sys.argv[1] == 'kill':\n"
        "    prepared.quantized = lambda *a, **k: lambda tensors: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if sys.argv[1] == 'again':\n"
        "    prepared.smooth_checkpoint = None\n"
        "main(sys.argv[2:])\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(how: str, output: Path) -> int:
        argv = ["prepare", "--model", base, "--format", "mxfp4", "--awq", "--calibration", text, *FEW]
        argv += ["--output", str(output)]
        return warm.run([sys.executable, "-c", code, how, *argv], env=environment).returncode

    assert run("finish", tmp_path / "a/out") == 0
    assert run("kill", tmp_path / "b/out") == -signal.SIGKILL
    assert (tmp_path / "b/.out.part/awq/model.safetensors").is_file()
    assert run("again", tmp_path / "b/out") == 0
    assert contents(tmp_path / "a/out") == contents(tmp_path / "b/out")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["out"]


def test_a_scaling_that_changes_the_function_is_refused(text, tmp_path, monkeypatch):
    pytest.importorskip("llmcompressor")
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    wrong = [AWQMapping("re:.*input_layernorm$", ["re:.*q_proj$", "re:.*k_proj$"])]  # v is left out
    monkeypatch.setattr("llmcompressor.modifiers.transform.awq.AWQModifier", lambda: AWQModifier(mappings=wrong))
    base = outliers(tmp_path / "base")
    said = refusal(base, tmp_path / "out", "--awq", "--calibration", text, *FEW, format="mxfp4")
    assert "llmcompressor's scaling changes the logits of Qwen3ForCausalLM by " in said


def test_what_is_refused(text, tmp_path):
    base = save_tiny(tmp_path / "base")
    out = tmp_path / "out"
    assert "`--awq` needs text" in refusal(base, out, "--awq")
    assert "acts only with `--awq`" in refusal(base, out, "--calibration", text)
    options = ["--awq", "--calibration", text]
    assert "not 'int8'; allowed: nvfp4, mxfp4, int4" in refusal(base, out, *options, format="int8")
    said = refusal(base, out, *options, "--calibration_samples", "0")
    assert "`--calibration_samples` 0 is out of range. It must be >= 1" in said
    assert "It must be <= 2048" in refusal(base, out, *options, "--calibration_length", "4096")
    assert "less than one sequence of 2048" in refusal(base, out, *options)
    assert "there is no such file" in refusal(base, out, "--perplexity", str(tmp_path / "nothing.jsonl"))


def test_awq_without_llmcompressor(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    base = save_tiny(tmp_path / "base")
    assert "`--awq` needs llmcompressor" in refusal(base, tmp_path / "out", "--awq", "--calibration", text)


# Perplexity


@pytest.mark.parametrize("format", rest_is_long(storable(), "fp8", "int4"))
def test_perplexity_is_that_of_the_checkpoint(format, text, tmp_path):
    """As transformers and compressed-tensors read it, by a formula of its own; inputs are rounded where they should."""
    base = save_tiny(tmp_path / "base", tied=False, dtype=torch.bfloat16)
    quantized = quantize_checkpoint(base, tmp_path / "q", format)
    sequences = token_sequences(text, tiny_tokenizer(), 2, 128)
    measured = perplexities(Path(base), quantized, format, sequences, "cpu", False)
    for path, found in zip((base, quantized), measured, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        logps = logits(model, sequences).float().log_softmax(-1)[:, :-1]
        chosen = logps.gather(-1, torch.tensor(sequences)[:, 1:, None])
        assert found == pytest.approx(math.exp(-chosen.mean().item()), rel=1e-5)
    assert measured[0] != measured[1]


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    model = tiny_model(tied=False)
    model.lm_head.weight.data.zero_()
    assert perplexity(model, [[1, 2, 3, 4]]) == pytest.approx(320)


def test_sequences_of_any_text(tmp_path):
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id

    def read(rows: list[dict], name: str) -> list[int]:
        path = tmp_path / name
        if path.suffix == ".parquet":
            Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (sequence,) = token_sequences(str(path), tokenizer, 1, 8)
        return sequence

    ids = tokenizer("ab").input_ids
    assert read([{"text": "ab"}, {"text": "abab"}], "a.jsonl") == [*ids, eos, *ids, *ids, eos]
    assert read([{"text": "ab"}, {"text": "abab"}], "a.parquet") == [*ids, eos, *ids, *ids, eos]
    assert read([{"question": "ab", "answer": "abab"}], "b.jsonl") == [*ids, *tokenizer("\nabab").input_ids, eos]
    chat = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "ba"}]
    (found,) = (read([{"conversations": chat}], "c.jsonl"),)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    assert found == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False)).input_ids[:8]
    with pytest.raises(ValueError, match=r"has the columns \['a'\]; one of them must be a text"):
        read([{"a": "b" * 100}], "d.jsonl")
    (tmp_path / "e.txt").write_text("ab" * 10)
    assert token_sequences(str(tmp_path / "e.txt"), tokenizer, 9, 8) == [ids * 4, ids * 4]


# The model card


def test_the_card_says_what_was_done(text, tmp_path, capsys):
    base = Path(save_tiny(tmp_path / "base", tied=False))
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n\nTrained by someone.\n")
    options = ["--perplexity", text, "--calibration_length", "64", "--perplexity_samples", "2"]
    out = prepare(base, tmp_path / "out", *options, format="int8")
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# out\n\n`base`, with the linear layers of its decoder in int8")
    assert "| quantized | 14 of 15 linear layers in int8: " in card and "| as they were | lm_head, " in card
    assert "| calibration | none; weights rounded to nearest |" in card and "trl_quant 0" in card
    assert "vllm serve out --host 127.0.0.1 --dtype bfloat16" in card
    assert card.rstrip().endswith("The card of base:\n\n# Base\n\nTrained by someone.") and str(tmp_path) not in card
    sequences = token_sequences(text, tiny_tokenizer(), 2, 64)
    before, after = perplexities(base, out, "int8", sequences, "cpu", False)
    line = f"perplexity: {before:.4g} before, {after:.4g} after; 2 sequences of 64 tokens of text.txt"
    assert line in capsys.readouterr().out.splitlines() and line.replace("perplexity:", "| perplexity |") in card


def test_the_card_names_the_revision(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--someone--model/snapshots/0123abc"
    save_tiny(snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(snapshot))
    monkeypatch.setattr("trl_quant.storage.source.check_named", lambda *given: None)  # asks the hub
    card = (prepare("someone/model", tmp_path / "out") / "README.md").read_text()
    assert card.startswith("---\nbase_model: someone/model\n---\n# out\n\n`someone/model`, revision `0123abc`, with ")
