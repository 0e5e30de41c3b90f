"""The embedded engine on two ranks that hold the policy in parts, against two that hold it whole."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_two_ranks
from tiny import save_tiny


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_parts_train_as_the_whole(tmp_path, tuning):
    """FSDP2 bit for bit; ZeRO-3, whose optimizer rounds otherwise, in the first step and nearly in the others."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    logs = {}
    for configuration in ("ddp", "fsdp2", "zero3"):
        on_two_ranks(configuration, __file__, tmp_path, tuning)
        logs[configuration] = json.loads((tmp_path / "logs.json").read_text())
    assert logs["fsdp2"] == logs["ddp"]
    first, *others = zip(logs["zero3"], logs["ddp"], strict=True)
    assert first[0] == first[1] and len(others) == 2
    for ours, theirs in others:
        assert ours["weights/normalized_update"] == pytest.approx(theirs["weights/normalized_update"], rel=1e-2)
    assert logs["ddp"][1] != logs["ddp"][2]


def train(path: Path, tuning: str) -> None:
    from training import config, dataset, lora, make

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    args = config(QuantGRPOConfig, path / "out", rollout_precision="int8", max_steps=3)
    peft_config = lora() if tuning == "lora" else None
    data, model = dataset(32), str(path / "model")
    trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=data, peft_config=peft_config)
    trainer.train()
    names = ("mismatch/kl_k3", "sampling/sampling_logp_difference/max", "reward")
    names += ("weights/normalized_quantization_error", "weights/normalized_update")
    logs = [{name: log.get(name) for name in names} for log in trainer.state.log_history if "loss" in log]
    if os.environ["RANK"] == "0":
        (path / "logs.json").write_text(json.dumps(logs))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    train(Path(sys.argv[1]), sys.argv[2])
