"""The table of precisions is the only place that knows them: a made-up one needs no other edit."""

import dataclasses
import itertools
import json
import os
import sys

import pytest
import torch
import warm
from accelerate import Accelerator
from drawing import generated
from places import HELPERS
from safetensors.torch import load_file
from ternary import MADE_UP, Ternary
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl_quant import QuantGRPOConfig
from trl_quant.cli import main as command
from trl_quant.cli import options
from trl_quant.cli.write_options import collect
from trl_quant.formats import FORMATS
from trl_quant.layers import EngineLinear
from trl_quant.precisions import PRECISIONS, Precision, in_vllm, markdown
from trl_quant.rollout import TransformersEngine
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.storage.layout import quantize_checkpoint
from trl_quant.storage.quantization import prepared_precisions


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setitem(FORMATS, "ternary", Ternary)
    monkeypatch.setitem(PRECISIONS, "ternary", MADE_UP)


def build(**kwargs):
    return QuantGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


def test_config_knows_it(made_up):
    assert build(rollout_precision="ternary", use_vllm=True).is_correction == "tis"
    with pytest.raises(ValueError, match=r"rollout_precision.*'ternary'"):
        build(rollout_precision="quaternary")


def test_config_does_not_know_it_without_the_table():
    with pytest.raises(ValueError, match=r"`rollout_precision`='ternary' is unknown"):
        build(rollout_precision="ternary")


def test_embedded_engine_samples_in_it(made_up):
    model = tiny_model(seed=3)
    engine = TransformersEngine(model, Accelerator(cpu=True), tiny_tokenizer(), precision="ternary")
    _, completions, logps, _ = generated(engine, [[65, 66, 67]])
    assert len(completions[0]) == len(logps[0]) > 0
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    layer = engine.copy.model.layers[0].mlp.up_proj
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    ternary = (weight / weight.abs().amax(-1, keepdim=True)).round() * weight.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(layer(x), x @ ternary.T, rtol=1e-4, atol=1e-4)
    assert (layer(x) - x @ weight.T).norm() > 0.3 * layer(x).norm()


def test_checkpoint_writer_and_command_line_know_it(made_up, tmp_path, monkeypatch, capsys):
    written_again = json.loads(collect())  # as `python -m trl_quant.cli.write_options` stores them
    monkeypatch.setattr(options, "stored", lambda: written_again)
    source = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    written = quantize_checkpoint(source, tmp_path / "ternary", "ternary")
    stored = load_file(written / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert stored.dtype == torch.int8 and set(stored.unique().tolist()) == {-1, 0, 1}
    command(["prepare", "--model", source, "--format", "ternary", "--output", str(tmp_path / "by-command")])
    again = load_file(tmp_path / "by-command/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(stored, again)
    from transformers import PreTrainedConfig

    scheme = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": Ternary.scheme.weights}}}
    assert prepared_precisions(PreTrainedConfig(quantization_config=scheme)) == {"ternary"}


def test_vllm_says_what_it_lacks(made_up):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    reason = supported_precisions()["ternary"]
    assert reason is not None and ("CPU" in reason or "99.0" in reason)
    assert list(supported_precisions()) == list(in_vllm())


def test_help_and_readmes_table_know_it(made_up):
    assert "| `ternary` | three values a row | 1.6 | 99.0 or newer | no |" in markdown()
    code = (
        "import sys\nfrom ternary import MADE_UP, Ternary\nfrom trl_quant.formats import FORMATS\n"
        "from trl_quant.precisions import PRECISIONS\n"
        "FORMATS['ternary'], PRECISIONS['ternary'] = Ternary, MADE_UP\n"
        "for name in [name for name in sys.modules if name.startswith('trl_quant.config')]: del sys.modules[name]\n"
        "from trl_quant.config import QuantGRPOConfig as C\n"
        "print(C.__dataclass_fields__['rollout_precision'].metadata['help'])"
    )
    environment = os.environ | {"PYTHONPATH": str(HELPERS)}
    done = warm.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert "or 'ternary'. `trl-quant choose" in done.stdout


def test_every_entry_names_a_format_and_every_format_has_an_entry():
    assert {entry.format for entry in PRECISIONS.values()} == {None, *FORMATS}
    assert all(field.name in Precision.__doc__ for field in dataclasses.fields(Precision))
    for name, vllm in in_vllm().items():
        inputs = vllm.inputs.get("cuda")
        assert inputs is None or FORMATS[inputs].activations is not None, name
        if vllm.online is None and name != "bf16":
            assert FORMATS[PRECISIONS[name].format].scheme is not None, name


TIE = 0.02  # between the errors of the three FP8 formats, relative


def test_nearest_to_the_policy_first():
    """The order is that of the relative errors in a layer's output; the three FP8 formats tie."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(512, 512, bias=False)
    x = torch.randn(256, 512, generator=generator)
    with torch.no_grad():  # rows of different sizes, as in trained models: one scale for all is too coarse
        layer.weight.copy_(torch.randn(512, 512, generator=generator) * torch.randn(512, 1, generator=generator).exp())
    exact, errors = layer(x), {}
    for name in PRECISIONS:
        quantized = EngineLinear(layer, name, torch.float32)
        quantized.load(layer.weight.detach())
        errors[name] = ((quantized(x) - exact).norm() / exact.norm()).item()
    groups = [["bf16"], ["int8"], ["fp8_block", "fp8", "fp8_tensor"], ["nf4", "nvfp4", "int4", "mxfp4"]]
    measured = [name for group in groups for name in group]
    assert [name for name in PRECISIONS if name in measured] == measured
    for nearer, farther in itertools.combinations(PRECISIONS, 2):  # further entries too
        assert errors[nearer] < errors[farther] * (1 + TIE), (nearer, farther)
    for nearer, farther in itertools.pairwise(groups):
        assert max(errors[name] for name in nearer) < min(errors[name] for name in farther) / 2
    last = [errors[name] for name in groups[-1]]
    assert last == sorted(last)
