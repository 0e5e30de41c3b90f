"""The noise arrives in vLLM's norms on a CPU, in every family whose norms are known, and BF16 norms swallow it."""

import pytest
from long_tests import rest_is_long


pytest.importorskip("vllm", reason="vLLM is not installed")
from noise_arrival import SIGMAS, arrival, arrivals, sampler_of
from tiny import MIXTURES

from trl_quant.rollout import RolloutNoise


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", rest_is_long(["qwen3", "llama", "phi3", "gemma2", "gemma3"]))
def test_noise_arrives(tmp_path, family):
    """The weakest in each family; stronger noise, which arrives where weaker does, in one."""
    sampler = sampler_of(tmp_path, "bf16", True, "cpu", family=family)
    sigmas = SIGMAS if family == "qwen3" else SIGMAS[-1:]
    for sigma, (effective, slope) in zip(sigmas, arrivals(sampler, sigmas), strict=True):
        assert effective == pytest.approx(sigma, rel=0.05)
        assert 0.7 < slope < 1.3
    sampler.sync()
    assert sampler.effective_sigma == 0
    sampler.check_sync()


@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "glm4_moe"))
def test_noise_arrives_in_mixtures(tmp_path, family):
    """All experts are chosen: with fewer, rounding in BF16 sends some tokens to others, which hides what noise does."""
    every_expert = {"num_experts_per_tok": 4}
    sampler = sampler_of(tmp_path, "bf16", True, "cpu", family=family, tied=False, **every_expert)
    for sigma, (effective, slope) in zip((3e-2, SIGMAS[-1]), arrivals(sampler, (3e-2, SIGMAS[-1])), strict=True):
        assert effective == pytest.approx(sigma, rel=0.05) and 0.7 < slope < 1.3
    sampler.check_sync()


def test_noise_arrives_beside_quantized_layers(tmp_path):
    effective, slope, sampler = arrival(tmp_path, "int8", True, SIGMAS[0], "cpu")
    assert effective == pytest.approx(SIGMAS[0], rel=0.05) and 0.5 < slope < 1.5
    sampler.lay_noise(RolloutNoise(SIGMAS[-1], 3, 7))
    assert sampler.effective_sigma == pytest.approx(SIGMAS[-1], rel=0.05)


def test_bf16_norms_swallow_it(tmp_path):
    effective, slope, sampler = arrival(tmp_path, "bf16", False, SIGMAS[-1], "cpu")
    assert effective < SIGMAS[-1] / 2 and slope < 0.6
    sampler.lay_noise(RolloutNoise(1e-2, 3, 7))
    assert sampler.effective_sigma == pytest.approx(1e-2, rel=0.15)  # what is coarser than BF16's steps arrives
