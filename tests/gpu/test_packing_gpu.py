"""Packed rows on a GPU: flash attention over segments, prompts shared, windows included.

python3 -m pytest -m gpu tests/gpu/test_packing_gpu.py
"""

import pytest
import torch
from packed_rows import CAN_PACK, assert_as_near, batch, model_of


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CAN_PACK)
def test_packed_rows_are_padded_ones(family, checkpointing):
    """In BF16 packed rows are as near as padded ones to padded rows in FP32."""
    model = model_of(family).cuda()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = {name: values.cuda() for name, values in batch(completion=300).items()}
    assert_as_near(model, given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_autocast(dtype):
    model = model_of("qwen2").cuda()
    given = {name: values.cuda() for name, values in batch(completion=300).items()}
    assert_as_near(model, given, dtype=getattr(torch, dtype))
