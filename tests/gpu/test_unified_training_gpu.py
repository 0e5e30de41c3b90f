"""
Trainer and vLLM in the same numbers on a GPU: the codes that the engine multiplies with, and how far the two part.

    python3 -m pytest -m gpu -s tests/gpu/test_unified_training_gpu.py

`-s` shows the KL of each pair and the share of tokens whose log-probabilities are the same bits.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from on_gpu import LORA, logps, sampled
from tiny import save_tiny
from training import config, make
from transformers.models.qwen2 import modeling_qwen2
from vllm_engines import GPU_MODEL, engine, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.frozen import freeze
from trl_quant.policy.unified import Gated, unify
from trl_quant.precisions import unified_flows


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
every_precision = pytest.mark.parametrize("precision", unified_flows())
OPTIONS = {"max_completion_length": 128, "max_num_seqs": 64}


def apart(samples, model) -> tuple[float, float]:
    """KL k3 of the samples' log-probabilities from the model's, in nats a token; the share that is bit-equal."""
    prompts, completions, theirs = samples
    ours = logps(model, [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)])
    d = torch.cat([own[len(p) - 1 :] - their for p, own, their in zip(prompts, ours, theirs, strict=True)])
    return (d.exp() - 1 - d).mean().item(), (d == 0).float().mean().item()


def codes_of(sampler) -> dict[str, torch.Tensor]:
    """Bytes of the down projections that vLLM multiplies with, (out, in)."""
    layers = sampler.llm.apply_model(lambda m: {n: x.weight for n, x in m.named_modules() if n.endswith("down_proj")})
    return {name: w if w.is_contiguous() else w.t() for name, w in layers[0].items()}


@every_precision
@pytest.mark.parametrize("lora", ["full", "merge", "adapter", "frozen"])
def test_trainer_and_engine_compute_the_same(tmp_path, precision, lora):
    model = policy(tmp_path / "policy", tied=False, **GPU_MODEL).cuda()
    if lora != "full":
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(**LORA))
    plain = copy.deepcopy(model)
    if lora == "frozen":  # a base in codes, which the engine then shares
        freeze(model, precision)
    unify(model, precision, lora == "merge", torch.bfloat16 if lora == "adapter" else None)
    options = OPTIONS | ({} if lora == "full" else {"lora_sync": "merge" if lora == "merge" else "adapter"})
    sampler = engine(model, precision, sync_check_steps=1, **options)
    for step in range(2):
        if step:
            update(model, seed=step)
            update(plain, seed=step)
        sampler.sync()
        layers = dict(sampler.weights.frozen()) if lora == "frozen" else sampler.weights.unified(precision)
        own = {name: layer.codes().values for name, layer in layers.items()}
        held = codes_of(sampler)
        assert held and all(torch.equal(w.view(torch.uint8), own[name].view(torch.uint8)) for name, w in held.items())
        samples = sampled(sampler)
        kl, equal = apart(samples, model)
        bf16, _ = apart(samples, plain)
        print(f"\n{precision:>10} {lora:<8} KL unified {kl:.2e} ({equal:.1%} bit-equal), BF16 trainer {bf16:.2e}")
    print(sampler.check_sync())
    if precision in ("fp8", "int8") and lora in ("full", "merge"):
        assert sampler.destinations  # so the second sync wrote in place
    # A last bit moves as many codes of INT8, whose steps are finer, beside a rounding that is smaller by itself
    assert 0 <= kl < (0.97 if precision == "int8" else 0.7) * bf16


def test_rotary_embedding_by_liger(tmp_path):
    """With `use_liger_kernel` Liger rotates, norms and MLPs go on quantizing, and the gradients stay the same."""
    pytest.importorskip("liger_kernel", reason="Liger is not installed")
    path = save_tiny(tmp_path / "model", family="qwen2", tied=False, dtype=torch.bfloat16, **GPU_MODEL)
    own = modeling_qwen2.apply_rotary_pos_emb
    ids = torch.randint(0, 250, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    gradients = []
    for liger in (False, True):
        settings = {"bf16": True, "use_cpu": False, "train_precision": "fp8", "max_steps": 1, "learning_rate": 0.0}
        args = config(QuantGRPOConfig, tmp_path / "out", use_liger_kernel=liger, **settings)
        trainer = make(QuantGRPOTrainer, args, model=path)
        trainer.train()
        assert (modeling_qwen2.apply_rotary_pos_emb is own) is not liger
        decoder = trainer.model.get_decoder()
        for layer in decoder.layers:
            assert "forward" not in vars(layer.input_layernorm)
            assert vars(layer.mlp)["forward"].__func__ is Gated.forward
        decoder(input_ids=ids).last_hidden_state.float().sin().sum().backward()
        gradients.append(torch.cat([param.grad.flatten() for param in decoder.parameters()]).float())
    without, with_liger = gradients
    assert (with_liger - without).norm() < 0.2 * without.norm()


def test_bf16_for_comparison(tmp_path):
    model = policy(tmp_path / "policy", tied=False, **GPU_MODEL).cuda()
    sampler = engine(model, "bf16", **OPTIONS)
    sampler.sync()
    kl, equal = apart(sampled(sampler), model)
    print(f"\n      bf16 KL {kl:.2e} ({equal:.1%} bit-equal)")
    assert 0 < kl < 0.1
