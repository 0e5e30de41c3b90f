"""Dense families in vLLM on a GPU: live engines equal fresh ones, also those that run transformers' classes, compiled.

python3 -m pytest -m gpu tests/gpu/test_families_gpu.py
"""

from inspect import signature

import pytest
import torch
from tiny import FAMILIES, FURTHER


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm_engines import GPU_MODEL, SMALL, assert_live_equals_fresh, engine, policy

from trl_quant.models.families import FAMILIES as TABLE
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
IN_VLLM = [family for family in FURTHER if TABLE[family].vllm]


def large(path, family: str):
    """A model that is large enough for every kernel. No window is shorter than a row."""
    sizes, own = dict(GPU_MODEL), (FAMILIES | FURTHER)[family][1]
    if "head_dim" in own:
        sizes["head_dim"] = 64
    if "layer_types" in own:
        sizes["layer_types"] = own["layer_types"] * (sizes["num_hidden_layers"] // 2)
    if "sliding_window" in own:
        sizes["sliding_window"] = 1024
    return policy(path, family=family, **sizes).cuda()


@pytest.mark.parametrize("precision", ["fp8", "int8", "nvfp4"])
@pytest.mark.parametrize("family", IN_VLLM)
def test_live_equals_fresh(tmp_path, family, precision):
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    model = large(tmp_path / "model", family)
    sampler = engine(model, precision)
    assert_live_equals_fresh(sampler, model, precision, tmp_path)
    if family == "ministral3" and "mscale" not in signature(YaRNScalingRotaryEmbedding).parameters:  # as in vLLM 0.26
        with pytest.raises(RuntimeError, match="does not sample from the policy"):
            sampler.check_sync()
    else:
        sampler.check_sync()


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_a_compiled_class_of_transformers(tmp_path, family):
    """The engine computes with the subclass that it got, and the policy with the class that it had."""
    model = large(tmp_path / "model", family)
    compiled = SMALL | {"compilation_config": {}}
    sampler = engine(model, "fp8", model_impl="transformers", engine_kwargs=compiled)
    own = type(model.get_decoder())
    assert own.__call__ is torch.nn.Module.__call__
    sampler.sync()
    sampler.check_sync()
