"""Without a GPU all tests of Triton kernels run in its interpreter (see `interpreter`)."""

import pytest
from interpreter import rerun, reruns
from long_tests import rest_is_long


MORE_THAN = {  # file -> tests
    "kernels/test_unified_kernel.py": 25,
    "kernels/test_kernels.py": 80,
    "kernels/test_dequantize_kernel.py": 15,
    "kernels/test_norm_kernel.py": 10,
    "kernels/test_head_kernel.py": 3,
    "kernels/test_marlin_kernel.py": 1,
    "rollout/test_fingerprint.py": 2,
}


@pytest.mark.slow
@reruns
@pytest.mark.parametrize("marks", rest_is_long(["not long", "long"]))
def test_in_the_interpreter(marks):
    passed = rerun([*MORE_THAN], marks)
    if marks == "long":
        assert sum(passed.values()) >= 4, passed
    else:
        assert all(passed[file] > count for file, count in MORE_THAN.items()), passed
