"""Ranks that train with PPO, and one process that trains on the same completions."""

import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


class Fixed:
    """An engine whose completions are decided by their prompts, so that ranks share out one batch."""

    def sync(self): ...

    def sample(self, requests):
        from trl_quant.rollout.engine import Samples

        prompts = [request.prompt for request in requests]
        ids = [[(sum(prompt) * (i + 3) + len(prompt)) % 256 for i in range(2 + len(prompt) % 5)] for prompt in prompts]
        return Samples(ids, [[-4.0 - token % 3 for token in row] for row in ids])


# tuning -> the update after which the run is saved, and resumed: in a generation, or between two
SAVED = {"full": 3, "lora": 2, "shared": 2}


def run(precision: str, tuning: str, path: Path, ranks: int = 2, resumes: bool = False):
    """Four updates, two of each generation, or those after the saved one."""
    from training import config, dataset, lora, make

    from trl_quant import QuantPPOConfig, QuantPPOTrainer

    class FromFixed(QuantPPOTrainer):
        def build_engine(self, *args, **settings):
            return Fixed()

    # All rows of a generation are in each of its two updates: TRL shuffles those of each rank by themselves
    settings = {"per_device_train_batch_size": 8 // ranks, "gradient_accumulation_steps": 2, "num_iterations": 2}
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": SAVED[tuning], "learning_rate": 0.1}
    settings |= {"value_learning_rate": 0.1, "max_grad_norm": 0.0, "loss_type": "dapo", "is_correction": "acr"}
    settings["adam_epsilon"] = 1.0  # so that the last bits of a small gradient do not become steps of their sign
    settings["vf_share_layers"] = tuning == "shared"
    args = config(QuantPPOConfig, path / "out", rollout_precision=precision, num_generations=1, lam=0.9, **settings)
    torch.manual_seed(0)  # of new adapters
    model, peft_config = str(path.parent / "model"), lora() if tuning == "lora" else None
    trainer = make(FromFixed, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
    trainer.begun = sums(trainer)
    trainer.train(str(path / f"out/checkpoint-{SAVED[tuning]}") if resumes else None)
    return trainer


def whole(model) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        param = param.full_tensor() if isinstance(param, DTensor) else param
        found[name.removeprefix("module.")] = param.detach().double()
    return found


def sums(trainer) -> dict[str, dict[str, float]]:
    """The sums of policy and critic."""
    return {"policy": sums_of(whole(trainer.model)), "critic": sums_of(whole(trainer.critic.model))}


def sums_of(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """The sum of each weight's entries with weights of their own."""
    found = {}
    for name, tensor in weights.items():
        factors = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).double()
        found[name] = (factors * tensor.cpu()).sum().item()
    return found


def log(trainer) -> list[dict]:
    names = ("reward", "value/mean", "value/return_mean", "value/grad_norm")
    return [
        {name: entry[name] for name in names if name in entry}
        for entry in trainer.state.log_history
        if "value/loss" in entry
    ]


def train(precision: str, tuning: str, path: Path) -> dict:
    """One rank: its end, and whether a run that resumes ends with the same bits."""
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
    trainer = run(precision, tuning, path)
    sharded = all(isinstance(param, DTensor) for param in trainer.critic.model.parameters())
    ends = whole(trainer.model) | {f"critic {name}": value for name, value in whole(trainer.critic.model).items()}
    found = {"weights": sums(trainer), "log": log(trainer), "start": trainer.begun, "sharded": sharded}
    again = run(precision, tuning, path, resumes=True)
    theirs = whole(again.model) | {f"critic {name}": value for name, value in whole(again.critic.model).items()}
    return found | {"resumed": all(torch.equal(value, theirs[name]) for name, value in ends.items())}
