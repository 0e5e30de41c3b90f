"""Two ranks that train in a `train_precision` a policy which FSDP2 shards, and the same policy held whole on each."""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


# tuning -> (whether FSDP2 lets a layer's weights go after its forward pass, settings of the run)
RUNS = {
    "full": (True, {"beta": 0.1, "save_strategy": "steps", "save_steps": 2}),
    "lora": (False, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "rounded": (True, {"bf16": True, "gradient_checkpointing": True}),
}


def train(precision: str, tuning: str, path: Path) -> dict:
    """One rank: a policy in parts, and, where both compute in one type, the same held whole, and one trained plainly."""
    from trl_quant.layers import unified

    found, counted = {}, []
    quantize = unified.quantize
    unified.quantize = lambda *args: counted.append(1) or quantize(*args)
    ours = trained(precision, tuning, path / "out")
    unified.quantize = quantize
    found["log"] = log(ours)
    found["quantized"] = len(counted)
    found["sharded"] = all(isinstance(param, DTensor) for param in ours.model.parameters())
    layers = ours.vllm_generation.weights.unified(precision)
    found["layers"] = len(layers)
    found["held"] = sum(base(layer)._codes is not None for layer in layers.values())
    found["codes"] = codes(ours, layers)
    mine = whole(ours)
    if tuning == "full":
        found["resumed"] = distance(whole(trained(precision, tuning, path / "out", resume=True)), mine, mine)
        ours.save_model(path / "saved")
    if tuning != "rounded":
        other = trained(precision, tuning, path / "whole", sharded=False)
        plain = trained(None, tuning, path / "plain", rollout_precision=precision)
        start, theirs = whole(trained(None, tuning, path / "start", sharded=False, max_steps=0)), whole(other)
        found |= {"whole": log(other), "plain": log(plain), "names": sorted(mine) == sorted(theirs)}
        found["distance"] = distance(mine, theirs, start)
        found["plain_distance"] = distance(whole(plain), theirs, start)
    return found


def trained(precision: str | None, tuning: str, path: Path, sharded: bool = True, resume: bool = False, **settings):
    """A trainer after three steps, or after the third alone."""
    from training import config, dataset, lora, make

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    reshards, own = RUNS[tuning]
    os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(tuning != "full").lower()
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = str(reshards).lower()
    settings = {"max_steps": 3, "train_precision": precision} | own | settings
    args = config(QuantGRPOConfig, path, **settings)
    torch.manual_seed(0)  # of new adapters
    peft_config = None if tuning == "full" else lora()
    model = str(path.parents[1] / "model")
    trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
    if args.max_steps:
        trainer.train(f"{path}/checkpoint-2" if resume else None)
    return trainer


def log(trainer) -> list[dict]:
    names = ("loss", "reward", "kl", "mismatch/kl_k3", "weights/normalized_update")
    return [{name: entry.get(name) for name in names} for entry in trainer.state.log_history if "loss" in entry]


def whole(trainer) -> dict[str, Tensor]:
    weights = trainer.vllm_generation.weights if trainer._engine is not None else None
    full = weights.full if weights else lambda param: param.data
    return {name: full(param).clone() for name, param in trainer.model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far two ends lie apart, in lengths of the way to the second."""
    gaps, ways = ([(other[name] - tensor).double().norm() for name, tensor in right.items()] for other in (left, start))
    return (torch.stack(gaps).norm() / torch.stack(ways).norm().clamp(min=1e-30)).item()


def base(layer):
    return getattr(layer, "base_layer", layer)


def codes(trainer, layers: dict) -> list[bool]:
    """Whether the codes that a forward and a backward pass multiply with are those that the engine gets."""
    from trl_quant.formats import quantize
    from trl_quant.layers import unified

    product, seen = unified.product, []
    unified.product = lambda x, w, *args: seen.append(w) or product(x, w, *args)
    tokens = torch.arange(8).view(1, -1)
    trainer.model(input_ids=tokens, use_cache=False).logits.sum().backward()
    unified.product = product
    weights = trainer.vllm_generation.weights
    sent = dict(trainer.vllm_generation.in_codes(trainer.vllm_generation._iter_named_params()))
    equal = []
    for (name, layer), used in zip(layers.items(), seen, strict=False):
        got = sent[f"{name}.weight"]
        equal.append(got.values.view(torch.uint8).equal(used.values.view(torch.uint8)) and got.scale.equal(used.scale))
    trainer.model.zero_grad()
    return equal
