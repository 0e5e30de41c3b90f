"""A second trainer with vLLM in a process, and further ones: in another precision, and after one that failed."""

import json
import sys

import pytest
import warm
from places import HELPERS


pytest.importorskip("vllm", reason="vLLM is not installed")
SCRIPT = HELPERS / "three_trainers.py"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("how", ["rebound", "deleted"])
def test_trainers_one_after_another(tmp_path, how):
    """The last one does what the first did, and none takes itself for one rank of several."""
    done = warm.run([sys.executable, SCRIPT, tmp_path, how], capture_output=True)
    assert done.returncode == 0, done.stderr[-4000:]
    int8, bf16, failed, unstarted, last = json.loads(done.stdout.splitlines()[-1])
    assert "no reward" in failed["error"] and "vLLM did not start" in unstarted["error"]
    assert last["log"] == int8["log"] != bf16["log"] and len(int8["log"]) == len(bf16["log"]) == 2
    assert {found["wrapped"] for found in (int8, bf16, last)} == {"Qwen3ForCausalLM"}
    assert not any(found["ranks"] for found in (int8, bf16, failed, unstarted, last))
    if how == "deleted":  # and the engine's model is gone
        assert [found["left"] for found in (int8, bf16, last)] == [0, 0, 0]
    else:
        assert int8["left"] == 1
