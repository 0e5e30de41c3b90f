"""Without a GPU all tests of Triton kernels run in its interpreter (see `interpreter`)."""

import pytest
from interpreter import rerun, reruns


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
def test_in_the_interpreter():
    passed = rerun([*MORE_THAN])
    assert all(passed[file] > count for file, count in MORE_THAN.items()), passed
