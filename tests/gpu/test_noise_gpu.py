"""The noise arrives in vLLM's norms on a GPU, under CUDA graphs and after syncs, in every precision.

python3 -m pytest -m gpu -s tests/gpu/test_noise_gpu.py
"""

import pytest


pytest.importorskip("vllm", reason="vLLM is not installed")
from noise_arrival import SIGMAS, arrival
from vllm_engines import GPU_MODEL, greedy, update

from trl_quant.precisions import in_vllm
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("precision", in_vllm())
def test_noise_arrives(tmp_path, precision):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    sampler = None
    for sigma in SIGMAS:
        effective, slope, sampler = arrival(
            tmp_path, precision, True, sigma, "cuda", sampler, family="qwen2", **GPU_MODEL
        )
        print(f"{precision:>10} sigma {sigma:.0e}: effective {effective:.2e}, slope {slope:.2f}")
        assert effective == pytest.approx(sigma, rel=0.05)
        # Where inputs are quantized, flipped codes drown weak noise in this statistic; what the norms hold is the same.
        assert 0.5 < slope < 1.5 or (precision != "bf16" and sigma < 1e-2)
    sampler.lay_noise(RolloutNoise())
    before = greedy(sampler.llm)
    update(sampler.model, seed=1)
    sampler.sync()  # a reload keeps the norms in FP32
    assert greedy(sampler.llm) != before
    effective, slope, _ = arrival(tmp_path, precision, True, SIGMAS[0], "cuda", sampler, family="qwen2", **GPU_MODEL)
    print(f"{precision:>10} after a sync: effective {effective:.2e}, slope {slope:.2f}")
    assert effective == pytest.approx(SIGMAS[0], rel=0.05) and 0.5 < slope < 1.5
    sampler.check_sync()


def test_bf16_norms_swallow_it(tmp_path):
    effective, slope, _ = arrival(tmp_path, "bf16", False, SIGMAS[-1], "cuda", family="qwen2", **GPU_MODEL)
    print(f"      bf16 norms: effective {effective:.2e}, slope {slope:.2f}")
    assert effective < SIGMAS[-1] / 2 and slope < 0.6
