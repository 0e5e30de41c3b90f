"""GRPO in the numbers that sample: trainer and engine agree where a BF16 or FP32 trainer does not."""

import json
import os
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny, tiny_model
from trained import layers_of, mismatches, trainer_of
from training import assert_same_run, config, lora, make, metrics, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantRLOOConfig
from trl_quant.formats import quantize
from trl_quant.precisions import PRECISIONS, in_vllm, train_precisions
from trl_quant.rollout.vllm.support import multiply_as_given


pytestmark = pytest.mark.isa


def test_it_is_saved_as_it_was(tmp_path):
    source = save_tiny(tmp_path / "model", tied=False)
    trainer = trainer_of(tmp_path / "out", "fp8", model=source)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    saved = type(trainer.model).from_pretrained(tmp_path / "saved")
    assert not layers_of(saved) and "quantization_config" not in json.loads(
        (tmp_path / "saved/config.json").read_text()
    )
    own = parameters(trainer)
    assert own.keys() == dict(saved.named_parameters()).keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.named_parameters())


def test_a_reference_policy_that_follows(tmp_path):
    """TRL writes it past torch's count after each step; the KL is that of the weights that it then has."""
    source = save_tiny(tmp_path / "model", tied=False)
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = trainer_of(tmp_path / "out", "fp8", model=source, beta=0.1, **follows)
    trainer.train()
    kl = [entry["kl"] for entry in metrics(trainer) if "kl" in entry]
    assert len(kl) == 3 and all(abs(value) < 1e-6 for value in kl)  # it is the policy at the start of each step


class PlainSGD(torch.optim.SGD):
    """Writes weights as torch does, or where it does not count it, as fused optimizers and ZeRO do."""

    past_torch = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    (param.data if self.past_torch else param).sub_(group["lr"] * param.grad)


class PastTorch(PlainSGD):
    past_torch = True


@pytest.mark.parametrize("peft", rest_is_long([False, True], True), ids=["full", "lora"])
def test_weights_that_an_optimizer_writes_past_torch(tmp_path, peft):
    runs = []
    for kind in (PlainSGD, PastTorch):
        trainer = trainer_of(tmp_path / kind.__name__, "fp8", model=tiny_model(seed=3), peft=peft)
        trained = [param for param in trainer.model.parameters() if param.requires_grad]
        trainer.optimizer = kind(trained, lr=1e-2)
        trainer.train()
        runs.append(trainer)
    assert_same_run(*runs)
    start = trainer_of(tmp_path / "start", "fp8", model=tiny_model(seed=3), peft=peft)
    weights = runs[1].vllm_generation.engine.weights
    first = start.vllm_generation.engine.weights.unified("fp8")
    for name, layer in weights.unified("fp8").items():
        whole = weights.of_linear(layer)
        assert torch.equal(layer.codes().values.view(torch.uint8), quantize(whole, "fp8").values.view(torch.uint8))
        assert not torch.equal(layer.codes().scale, first[name].codes().scale)


@pytest.mark.parametrize(
    ("precision", "given", "replaced"),
    [("fp8", None, set()), ("fp8", {"swiglu": True}, {"swiglu"}), (None, None, {"rms_norm", "swiglu"})],
)
def test_liger_replaces_no_layer_that_quantizes(tmp_path, monkeypatch, precision, given, replaced):
    """Its norms and MLPs, unless they are asked for; without a precision all are TRL's choice."""
    asked = []
    installed = "trl_quant.config.checks.machine.is_liger_kernel_available"
    monkeypatch.setattr(installed, lambda: False)
    with pytest.raises(ImportError, match="`use_liger_kernel`=True needs Liger's kernels"):
        trainer_of(tmp_path, precision, use_liger_kernel=True, model="there is none")
    monkeypatch.setattr(installed, lambda: True)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, config: asked.append(config))
    with pytest.warns(FutureWarning, match="use_liger_kernel"):
        trainer = trainer_of(tmp_path, precision, max_steps=1, use_liger_kernel=True, liger_kernel_config=given)
    trainer.train()
    (config,) = asked
    assert not config["fused_linear_cross_entropy"]  # TRL's choice
    assert {name for name in ("rms_norm", "swiglu") if config.get(name, True)} == replaced
    assert config.get("rope", True)


def test_another_sampler(tmp_path):
    trainer = trainer_of(tmp_path, "int8", rollout_precision="int4")
    trainer.train()
    assert mean(mismatches(trainer)) > 1e-4


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precision": "fp8_block", "use_vllm": True, "vllm_mode": "server"},
            "VLLM_USE_DEEP_GEMM_E8M0=0, which cannot be seen",
        ),
        *(
            ({"precision": name}, f"`train_precision`='{name}' is unknown")
            for name in PRECISIONS
            if name not in train_precisions()
        ),
    ],
)
def test_refused_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **{"precision": "fp8"} | options)


@pytest.mark.parametrize("adapter", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_cannot_be_merged_is_refused_before_a_model_is_loaded(tmp_path, adapter):
    args, model = config(QuantGRPOConfig, tmp_path, train_precision="fp8"), save_tiny(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(ValueError, match="`lora_dropout=0`, or with vLLM in colocate mode"):
        make(QuantGRPOTrainer, args, model=model, peft_config=lora(**adapter))
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        make(QuantGRPOTrainer, args, model=model, peft_config=lora())


def test_an_environment_in_which_vllm_changes_the_weights(monkeypatch):
    """On Hopper DeepGEMM would quantize them again; set by hand to do so it is refused, else it is told not to."""
    given = {name: vllm.as_given for name, vllm in in_vllm().items() if vllm.as_given}
    assert given == {"fp8_block": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM_E8M0", raising=False)
    multiply_as_given("fp8")
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in os.environ
    multiply_as_given("fp8_block")
    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")
    with pytest.raises(
        ValueError, match="`VLLM_USE_DEEP_GEMM_E8M0`='1' in the environment makes vLLM change the weights"
    ):
        multiply_as_given("fp8_block")


@pytest.mark.parametrize(("precision", "sharding"), [("nvfp4", "FSDP2"), ("nvfp4", "ZeRO-3"), ("fp8", "ZeRO-3")])
def test_sharded_weights_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch, precision, sharding):
    args = config(QuantGRPOConfig, tmp_path, train_precision=precision)
    source = save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    if sharding == "ZeRO-3":
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    else:  # as accelerate's launcher says it
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match=f"`train_precision`='{precision}' with {sharding}, which shards weights"):
        make(QuantGRPOTrainer, args, model=source, peft_config=lora())


@pytest.mark.parametrize(
    "precisions", [{"rollout_precision": "int8"}, {"train_precision": "fp8"}, {"train_precision": "nvfp4"}]
)
@pytest.mark.parametrize("config_class", [QuantGRPOConfig, QuantRLOOConfig, QuantPPOConfig])
def test_fsdp1_is_refused_by_its_name(tmp_path, monkeypatch, precisions, config_class):
    """However it is asked for, when the config is built. FSDP2 is not, nor is a run of TRL's own."""
    refused = pytest.raises(ValueError, match=r"with FSDP1.*Use FSDP2 \(`fsdp_version: 2` in accelerate's config")
    with refused:
        config(config_class, tmp_path, fsdp=True, fsdp_config={"version": 1}, **precisions)
    config(config_class, tmp_path, fsdp=True, fsdp_config={"version": 2}, **precisions)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused:
        config(config_class, tmp_path, **precisions)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert config(config_class, tmp_path, **precisions).fsdp_version == 2


def test_fsdp_as_given_or_launched(tmp_path, monkeypatch):
    assert config(QuantGRPOConfig, tmp_path).fsdp_version is None
    assert config(QuantGRPOConfig, tmp_path, fsdp=True, fsdp_config={"version": 1}).fsdp_version == 1
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert config(QuantGRPOConfig, tmp_path).fsdp_version == 1
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert config(QuantGRPOConfig, tmp_path).fsdp_version == 2
