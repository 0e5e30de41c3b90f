"""What holds for each kind of training alike: in 8 bits with and without an adapter, and all weights in 4 bits."""

from statistics import mean

import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny
from trained import layers_of, mismatches, trainer_of
from training import assert_same_run, metrics, parameters

from trl_quant.precisions import qat_precisions, unified_flows
from trl_quant.rollout import SharedEngine


pytestmark = pytest.mark.isa

each_kind = pytest.mark.parametrize("precision", ["fp8", "nvfp4"])  # unified, QAT
CASES = [
    *(
        pytest.param(name, False, id=f"{name}-full", marks=pytest.mark.long)
        for name in [*unified_flows(), *qat_precisions()]
    ),
    pytest.param("fp8_block", True, id="fp8_block-lora"),  # the flow whose codes depend on most of a weight
]


@pytest.mark.parametrize(("precision", "peft"), CASES)
def test_trainer_and_sampler_agree(tmp_path, precision, peft):
    """
    In 8 bits, what is left between them are last bits that move a code to the next one. In 4 bits, only the order of
    sums differs, as on a frozen base. A plain trainer, in FP32, is far from both samplers.
    """
    ours = trainer_of(tmp_path / "ours", precision, peft=peft, max_completion_length=32)
    assert isinstance(ours.vllm_generation.engine, SharedEngine) and ours.args.rollout_precision == precision
    plain = trainer_of(tmp_path / "plain", None, peft=peft, rollout_precision=precision, max_completion_length=32)
    before = parameters(ours)
    ours.train()
    plain.train()
    assert mean(mismatches(ours)) < 0.2 * mean(mismatches(plain))
    if precision in qat_precisions():
        assert max(map(abs, mismatches(ours))) < 1e-9 and min(mismatches(plain)) > 1e-2
    after = parameters(ours)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if not peft or "lora_" in name}  # embeddings, norms and biases too
    policy = ours.model.get_base_model() if peft else ours.model
    assert len(layers_of(policy)) == 7 * policy.config.num_hidden_layers
    assert type(policy.get_output_embeddings()) is torch.nn.Linear


@pytest.mark.parametrize("precision", rest_is_long(["fp8", "nvfp4"], "nvfp4"))
def test_several_micro_batches_and_checkpointing_change_nothing(tmp_path, precision):
    runs = []
    for checkpoints in (False, True):
        runs.append(trainer_of(tmp_path / str(checkpoints), precision, gradient_checkpointing=checkpoints, max_steps=2))
        runs[-1].train()
    assert_same_run(*runs)
    moves, sgd = [], {"max_steps": 1, "optim": "sgd", "learning_rate": 1e-2}  # Adam turns rounding of zeros into steps
    for size, accumulated in ((8, 1), (4, 2), (4, 1)):
        batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        trainer = trainer_of(tmp_path / f"{size}x{accumulated}", precision, **sgd, **batch)
        start = parameters(trainer)
        trainer.train()
        moves.append(torch.cat([(tensor - start[name]).flatten() for name, tensor in parameters(trainer).items()]))
    whole, parts, half = moves
    assert (parts - whole).norm() < 1e-4 * whole.norm() < (half - whole).norm()


@each_kind
def test_the_reference_policy_computes_so_too(tmp_path, precision):
    """At the first step it is the policy: TRL's KL term is 0, which it is not for a plain reference."""
    source = save_tiny(tmp_path / "model", tied=False)
    trainer = trainer_of(tmp_path / "out", precision, source, beta=0.1)
    assert layers_of(trainer.ref_model).keys() == layers_of(trainer.model).keys()
    trainer.train()
    kl = [entry["kl"] for entry in metrics(trainer) if "kl" in entry]
    assert abs(kl[0]) < 1e-6 < kl[-1]


@each_kind
def test_noise(tmp_path, precision):
    noised = trainer_of(tmp_path, precision, noise_schedule="exponential", noise_stages=3, max_steps=6)
    noised.train()
    sigmas = [(e["noise/sigma"], e["noise/effective_sigma"]) for e in metrics(noised) if "noise/sigma" in e]
    assert sigmas[0] == (0, 0) and all(arrived == pytest.approx(sigma, rel=0.1) for sigma, arrived in sigmas[2:])


@each_kind
def test_a_quantized_policy_is_refused(tmp_path, precision):
    """Before its weights are read."""
    source = save_tiny(tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="trains 16- or 32-bit weights, which a `quantization_config` replaces"):
        trainer_of(tmp_path, precision, source, model_init_kwargs={"quantization_config": {}})
