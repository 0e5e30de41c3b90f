"""The asynchronous example: it trains on a laptop, and shows the server's command on a GPU."""

import sys

import pytest
from places import ROOT


sys.path.insert(0, str(ROOT / "examples"))

import async_gsm8k


pytestmark = pytest.mark.isa


def test_it_trains_on_a_laptop(tmp_path):
    small = {"per_device_train_batch_size": 32, "max_steps": 3, "logging_steps": 1, "disable_tqdm": True}
    trainer = async_gsm8k.main(async_gsm8k.LAPTOP, output_dir=str(tmp_path), **small)
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(log) == 3 and all(0.1 < entry["reward"] < 0.8 for entry in log)  # the stored model is right on a third
    assert all(entry["mismatch/kl_k3"] < 0.1 for entry in log) and log[-1]["rollouts/age_max"] <= 2


@pytest.mark.vllm
def test_the_error_has_the_servers_command(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    local = {"model": async_gsm8k.LAPTOP["model"], "data": async_gsm8k.LAPTOP["data"], "rollout_precision": "int8"}
    local |= {"reward": async_gsm8k.arithmetic_reward, "use_cpu": True, "bf16": False, "output_dir": str(tmp_path)}
    nowhere = {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.1}
    with pytest.raises(ConnectionError, match="Start it with") as refused:
        async_gsm8k.main(async_gsm8k.GSM8K, **local, **nowhere)
    command = str(refused.value)
    assert "VLLM_SERVER_DEV_MODE=1" in command and "arithmetic_model-int8" in command and "--port 9" in command
