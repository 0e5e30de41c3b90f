"""Attention along the paths of a trie on a GPU, by torch's flash attention, windows included.

python3 -m pytest -m gpu tests/gpu/test_trees_gpu.py
"""

import pytest
import torch
from tree_rows import CAN_GROW, alone, apart, model_of, together

from trl_quant.policy.trees import TREES


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CAN_GROW)
def test_a_trie_is_each_sample_alone(family, checkpointing):
    """Under autocast to BF16, a row is as near as the samples alone to the samples alone in FP32."""
    model = model_of(family, "eager").cuda()
    exact = alone(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        rounded = alone(model)
        model.set_attn_implementation(TREES)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = together(model)
    assert 0 < distance(found, exact) < 1.3 * distance(rounded, exact)


@pytest.mark.parametrize("family", CAN_GROW)
def test_in_fp32(family):
    """Flash attention has no FP32: one segment follows the other."""
    assert apart(together(model_of(family, TREES).cuda()), alone(model_of(family, "eager").cuda())) < 1e-3


def distance(left, right) -> float:
    gaps = [(left[1][name].double() - grad.double()).norm() for name, grad in right[1].items()]
    return torch.stack(gaps).norm().item()
