"""
All weights trained for four bits on a GPU: vLLM's own Marlin kernels sample with the codes of the trainer.

    python3 -m pytest -m gpu -s tests/gpu/test_qat_gpu.py

`-s` shows the KL of each pair. Here the Triton quantizers make the codes, which
`tests/layers/test_qat_linear.py` does not run.
"""

import copy

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
from on_gpu import mismatch
from vllm_engines import GPU_MODEL, assert_live_equals_fresh, engine, policy

from trl_quant.formats import global_scale, quantize
from trl_quant.layers import UnifiedLinear, share_scale
from trl_quant.policy.unified import unify
from trl_quant.precisions import in_vllm, qat_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
every_precision = pytest.mark.parametrize("precision", [name for name in qat_precisions() if name in in_vllm()])


@every_precision
@pytest.mark.parametrize("family", ["qwen2", "llama", "phi3"])
def test_live_equals_fresh(tmp_path, precision, family):
    """After each update the engine computes what one does that starts on a prepared checkpoint, bit for bit."""
    model = policy(tmp_path / "policy", tied=False, family=family, **GPU_MODEL).cuda()
    unify(model, precision)
    sampler = engine(model, precision, sync_check_steps=1)
    assert_live_equals_fresh(sampler, model, precision, tmp_path)
    print(f"\n{precision:>10} {family}: {sampler.check_sync()}")


@every_precision
def test_mismatch_like_bf16s(tmp_path, precision):
    """Policy and engine are as near as BF16's two; a BF16 policy with a sampler in four bits is far away."""
    options = {"max_completion_length": 128, "max_num_seqs": 64}
    model = policy(tmp_path / "policy", tied=False, **GPU_MODEL).cuda()
    plain = copy.deepcopy(model)
    unify(model, precision)
    found = []
    for policy_model, format in ((model, precision), (plain, "bf16"), (plain, precision)):
        sampler = engine(policy_model, format, **options)
        sampler.sync()
        found.append(mismatch(sampler, policy_model))
    ours, bf16, apart = found
    print(f"\n{precision:>10}: KL of trained weights {ours:.2e}, of BF16 {bf16:.2e}, of a BF16 policy {apart:.2e}")
    assert 0 < ours < 1.5 * bf16 < 0.1 * apart


@pytest.mark.parametrize("precision", qat_precisions())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_gradients_are_the_cpus(precision, dtype):
    """Codes of fused layers bit for bit, INT4's without a kernel among them; gradients against products in FP64."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, outputs, dtype=dtype) for outputs in (512, 128)]
    model = torch.nn.ModuleList(UnifiedLinear.from_linear(layer, precision) for layer in layers)
    if precision == "nvfp4":
        share_scale(list(model))
    shared = global_scale(*(layer.weight for layer in model)) if precision == "nvfp4" else None
    expected = [quantize(layer.weight.detach(), layer.format, shared) for layer in model]
    model.cuda()
    for layer, q in zip(model, expected, strict=True):
        own = layer.codes()
        assert torch.equal(own.values.cpu().view(torch.uint8), q.values.view(torch.uint8))
        assert torch.equal(own.scale.cpu().view(torch.uint8), q.scale.view(torch.uint8))
        x = torch.randn(256, 1024, device="cuda", dtype=dtype, requires_grad=True)
        dy = torch.randn(256, layer.out_features, device="cuda", dtype=dtype)
        y = layer(x)
        y.backward(dy)
        numbers = q.dequantize(torch.float64).cuda()
        right = (
            x.double() @ numbers.t() + layer.bias.double(),
            dy.double() @ numbers,
            dy.double().t() @ x.double(),
        )
        for ours, theirs in zip((y, x.grad, layer.weight.grad), right, strict=True):
            assert (ours.double() - theirs).norm() < 2**-7 * theirs.norm()
        plain = dy.double() @ layer.weight.double()
        assert (x.grad.double() - plain).norm() > 0.04 * plain.norm()
