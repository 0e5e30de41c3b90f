"""
Hybrids in vLLM on a GPU: live equals fresh in each precision, gates and convolutions keep their type, trainer and
sampler agree, and the kernels that train are asked whether they take the borders of packed rows.

    python3 -m pytest -m gpu -s tests/gpu/test_hybrids_gpu.py

Where flash-linear-attention and causal-conv1d are installed, packed rows are compared with padded ones.
"""

from importlib.util import find_spec

import pytest
import torch
from packed_rows import PROMPT, apart_from, batch, gradients
from peft import LoraConfig, get_peft_model
from tiny import tiny_tokenizer
from training import make
from trl.trainer.utils import add_fused_lm_head


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm import ModelRegistry
from vllm_engines import GPU_RUN, SLEEPING, SMALL, engine, fresh, greedy, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.hybrids import runs_across_borders
from trl_quant.policy.packed import PackedRows, accept_packed_rows
from trl_quant.precisions import PRECISIONS, with_experts
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm.adapter import linear_layers
from trl_quant.rollout.vllm.support import outside_decoder, supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
}
# Heads as published, and every matrix a multiple of 128 wide and high but for the gates, and Falcon-H1's `in_proj`
SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
DELTA_NET = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128}
DELTA_NET |= {"linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"], **SIZES}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "partial_rotary_factor": 0.25}
SHAPES = {
    "qwen3_5_text": DELTA_NET | {"intermediate_size": 2816, "rope_parameters": ROPE},
    "qwen3_next": DELTA_NET | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    "falcon_h1": SIZES
    | {"intermediate_size": 2816, "mamba_d_ssm": 4096, "mamba_n_heads": 64, "mamba_d_head": 64}
    | {"mamba_d_state": 128, "mamba_chunk_size": 128},
}
# vLLM's own choice on Hopper is flashinfer's kernel, and it does not look whether that is installed
GIVEN = {} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"}
LINEAR = r".*\.(in_proj\w*|q_proj|down_proj)"


def hybrid(path, family: str):
    if ARCHITECTURES[family] not in ModelRegistry.models:
        pytest.skip(f"this vLLM has no {ARCHITECTURES[family]}")
    return policy(path, family=family, tied=False, **SHAPES[family]).cuda()


def kept(llm) -> set[str]:
    """The layers that vLLM does not quantize, by the last part of their names."""
    (layers,) = llm.apply_model(linear_layers)
    plain = (name for name, layer in layers.items() if type(layer.quant_method).__name__ == "UnquantizedLinearMethod")
    return {name.rpartition(".")[2] for name in plain}


@pytest.mark.parametrize("precision", ["bf16", *(name for name in with_experts() if name != "bf16")])
@pytest.mark.parametrize("family", SHAPES)
def test_live_equals_fresh(family, precision, tmp_path):
    """Falcon-H1's `in_proj` has a row for each head beside its others, which no block of `fp8_block` divides."""
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    if (family, precision) == ("falcon_h1", "fp8_block"):
        pytest.skip("vLLM's blocks of 128 do not divide `in_proj`")
    model = hybrid(tmp_path / "model", family)
    sampler = engine(model, precision, engine_kwargs=SLEEPING | GIVEN, enable_sleep_mode=True)
    if PRECISIONS[precision].format is not None:
        gates = {"in_proj_ba"} if family != "falcon_h1" else set()
        assert kept(sampler.llm) - {"gate", "shared_expert_gate"} == {"conv1d", *gates}
    seen, copies = [], []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        print(family, precision, sampler.check_sync())
        assert sampler.differing_weight() is None
        seen.append(greedy(sampler.llm))
        copies.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        sampler.rest()
        sampler.ensure_ready()
        assert greedy(sampler.llm) == seen[-1]
    assert len({str(samples) for samples in seen}) == 3
    online, chosen = PRECISIONS[precision].vllm.online, sampler.llm.llm_engine.vllm_config.model_config.quantization
    codes = {"device": "cuda", "prepared": PRECISIONS[precision].format is not None and chosen != online}
    outside = outside_decoder(model, [type(model).__name__], "auto")
    if online and chosen == online and outside:
        codes["quantization_config"] = {"ignore": outside}  # else vLLM quantizes gates too
    for number, (state, samples) in enumerate(zip(copies, seen, strict=True)):
        model.load_state_dict(state)
        assert greedy(fresh(model, precision, tmp_path / f"checkpoint-{number}", **codes, **GIVEN)) == samples
    torch.cuda.empty_cache()


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_adapter_beside_its_base_and_noise(family, precision, tmp_path):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    model = get_peft_model(hybrid(tmp_path / "model", family), LoraConfig(r=8, target_modules=LINEAR))
    sampler, seen = engine(model, precision, lora_sync="adapter", wide_norms=True, engine_kwargs=SMALL | GIVEN), []
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        seen.append(greedy(sampler.llm))
    sampler.lay_noise(RolloutNoise(3e-2, 3, 7))
    noisy = greedy(sampler.llm)
    assert sampler.effective_sigma == pytest.approx(3e-2, rel=0.05)
    sampler.lay_noise(RolloutNoise())
    assert greedy(sampler.llm) == seen[-1]
    assert len({str(samples) for samples in (*seen, noisy)}) == 3


@pytest.mark.parametrize("settings", [{"rollout_precision": "fp8"}, {"train_precision": "fp8"}], ids=str)
def test_trainer_and_sampler_agree(settings, tmp_path):
    """
    On log-probabilities that vary by 0.5 nats from token to token. Those of the policy as it is made vary by 3.3, of
    which FP8 moves them by 0.4.
    """
    model = hybrid(tmp_path / "model", "qwen3_5_text")
    model.get_output_embeddings().weight.data.mul_(0.15)
    path = tmp_path / "even"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    args = QuantGRPOConfig(
        output_dir=str(tmp_path / "out"),
        vllm_engine_kwargs=SMALL | GIVEN,
        max_steps=3,
        max_completion_length=64,
        learning_rate=1e-4,
        logging_steps=1,
        report_to="none",
        num_generations=4,
        per_device_train_batch_size=8,
        sync_check_steps=1,
        **GPU_RUN | settings,
    )
    trainer = make(QuantGRPOTrainer, args, model=str(path))
    keep(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "mismatch/abs_logp_diff" in entry]
    print(settings, trainer.packs, [entry["mismatch/abs_logp_diff"] for entry in logged])
    assert len(logged) == 3
    assert all(entry["sync_check/logp_difference"] < entry["sync_check/bound"] for entry in logged)
    assert all(0 < entry["mismatch/abs_logp_diff"] < 0.1 for entry in logged)


@pytest.mark.parametrize("family", SHAPES)
def test_packed_rows_where_kernels_take_borders(family, tmp_path):
    """By gradients: as near to padded rows in FP32 as padded rows in BF16 are, or refused."""
    model = policy(tmp_path / "model", family=family, tied=False, **SHAPES[family]).cuda()
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    given = {name: tensor.cuda() for name, tensor in batch().items()}
    if runs_across_borders(model):
        with pytest.raises(ValueError, match="would carry their state from one sequence"):
            accept_packed_rows(model)
        pytest.skip("the kernels that are installed take no borders")
    exact = gradients(model.float().train(), model, given)
    padded = gradients(model.bfloat16(), model, given)
    accept_packed_rows(model)
    packed = gradients(model, PackedRows(model, PROMPT, False), given)
    assert 0 < apart_from(exact, packed) < 1.3 * apart_from(exact, padded)
