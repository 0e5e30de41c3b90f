"""Two ranks that train in a `train_precision` a policy which FSDP2 shards, and the same policy held whole on each."""

import os
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


# tuning -> (whether FSDP2 lets a layer's weights go after its forward pass, settings of the run)
RUNS = {
    "full": (True, {"beta": 0.1, "save_strategy": "steps", "save_steps": 2}),
    "lora": (False, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "rounded": (True, {"bf16": True, "gradient_checkpointing": True}),  # an adapter, gathered in BF16
    "experts": (True, {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}),  # all weights
}


def train(precision: str, tuning: str, path: Path) -> dict:
    """One rank: the policy in parts; where both compute in one type also held whole, and trained plainly."""
    from safetensors.torch import load_file

    from trl_quant.layers import unified

    if tuning == "experts":
        return train_experts(precision, path)
    quantize, made = unified.quantize, []
    unified.quantize = lambda *args: made.append(1) or quantize(*args)
    ours = trained(precision, tuning, path / "ours")
    unified.quantize = quantize
    end = whole(ours)
    found = {"log": log(ours), "quantized": len(made)} | codes(ours, precision)
    found["sharded"] = all(isinstance(param, DTensor) for param in ours.model.parameters())
    if tuning == "full":
        ours.save_model(path / "saved")
        ours.accelerator.wait_for_everyone()
        saved = load_file(path / "saved" / "model.safetensors")
        tied = saved.keys() - end.keys()
        found["saved"] = tied <= {"lm_head.weight"} and all(saved[name].equal(end[name]) for name in end)
        resumed = whole(trained(precision, tuning, path / "ours", resume=True))
        found["resumed"] = all(tensor.equal(resumed[name]) for name, tensor in end.items())
    if tuning != "rounded":
        other = trained(precision, tuning, path / "other", sharded=False)
        plain = trained(None, tuning, path / "plain", rollout_precision=precision)
        found |= {"other": log(other), "plain": log(plain), "gap": gap(end, whole(other), other.start)}
        found["plain_gap"] = gap(whole(plain), whole(other), other.start)
    return found


def train_experts(precision: str, path: Path) -> dict:
    """
    One rank of a mixture, as [`train`]: and whether the engine gets the codes of the weights that the optimizer holds,
    and none are left in the policy's memory after its passes.
    """
    from trl_quant.formats import quantize
    from trl_quant.layers import UnifiedExperts

    ours = trained(precision, "experts", path / "ours")
    end, weights = whole(ours), ours.vllm_generation.engine.weights
    experts = [module for module in ours.model.modules() if isinstance(module, UnifiedExperts)]
    sent = {name: codes() for name, codes in weights.quantized_weights(precision).items() if ".experts." in name}
    found = {"log": log(ours), "sharded": all(isinstance(param, DTensor) for param in ours.model.parameters())}
    found["sent"] = [same(codes, quantize(end[name], precision)) for name, codes in sent.items()]
    ours.model(input_ids=torch.arange(8).view(1, -1), use_cache=False).logits.sum().backward()
    found["held"] = sum(len(module.held) for module in experts)
    found["gradients"] = all(param.grad is not None for module in experts for param in module.parameters())
    resumed = whole(trained(precision, "experts", path / "ours", resume=True))
    found["resumed"] = all(tensor.equal(resumed[name]) for name, tensor in end.items())
    other = trained(precision, "experts", path / "other", sharded=False)
    plain = trained(None, "experts", path / "plain", rollout_precision=precision)
    found |= {"other": log(other), "plain": log(plain), "gap": gap(end, whole(other), other.start)}
    found["plain_gap"] = gap(whole(plain), whole(other), other.start)
    return found


def trained(precision: str | None, tuning: str, path: Path, sharded: bool = True, resume: bool = False, **settings):
    """A trainer after three steps, or after the third alone; `start` is what it started from."""
    from training import config, dataset, lora, make, parameters

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    reshards, own = RUNS[tuning]
    os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = str(reshards).lower()
    settings |= {"train_precision": precision, "max_steps": 3, "max_grad_norm": 0.0, "is_correction": "none"}
    args = config(QuantGRPOConfig, path, **own, **settings)
    torch.manual_seed(0)  # of new adapters
    peft_config = None if tuning in ("full", "experts") else lora()
    model = str(path.parents[1] / ("mixture" if tuning == "experts" else "model"))
    trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
    trainer.start = parameters(trainer)
    trainer.train(f"{path}/checkpoint-2" if resume else None)
    return trainer


def log(trainer) -> list[dict]:
    names = ("loss", "reward", "kl", "mismatch/kl_k3")
    return [{name: entry.get(name) for name in names} for entry in trainer.state.log_history if "loss" in entry]


def whole(trainer) -> dict[str, Tensor]:
    def full(param: Tensor) -> Tensor:
        return param.full_tensor() if isinstance(param, DTensor) else param.data

    return {name: full(param).clone() for name, param in trainer.model.named_parameters()}


def gap(left: dict[str, Tensor], right: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far two ends lie apart, in lengths of the way to the second."""
    gaps, ways = ([(other[name] - tensor).double().norm() for name, tensor in right.items()] for other in (left, start))
    return (torch.stack(gaps).norm() / torch.stack(ways).norm()).item()


def codes(trainer, precision: str) -> dict:
    """
    How many layers there are; of how many the engine gets the codes of a forward pass, and of how many it would not if
    nothing were rounded as that gathers it; whether a backward pass has these codes; how many products there are, and
    of how many the codes are in memory between the two passes, and after them.
    """
    from trl_quant.formats import quantize
    from trl_quant.layers import eager

    names = ("product", "input_gradient", "input_and_weight_gradient")
    products = {name: getattr(eager, name) for name in names}
    forward, backward, alive = [], [], []
    for name, function in products.items():

        def multiply(x, w, *args, function=function, seen=forward if name == "product" else backward):
            seen.append(replace(w, values=w.values.clone(), scale=w.scale.clone()))
            alive.append(weakref.ref(w))
            return function(x, w, *args)

        setattr(eager, name, multiply)
    engine = trainer.vllm_generation.engine
    layers = engine.weights.unified(precision)
    trainer.model.train()
    logits = trainer.model(input_ids=torch.arange(8).view(1, -1), use_cache=False).logits
    between = sum(w() is not None for w in alive)
    logits.sum().backward()
    trainer.model.zero_grad()
    for name, function in products.items():
        setattr(eager, name, function)
    after = sum(w() is not None for w in alive)
    sent = dict(engine.quantized_as_trained(engine.policy_stream()))
    sent = [sent[f"{name}.weight"] for name in layers]
    computed, used = [], 0
    while len(computed) < len(sent):  # what follows is computed again, by checkpoints
        computed += apart(forward[used], [len(q.values) for q in sent[len(computed) :]])
        used += 1
    forward = forward[:used]
    return {
        "layers": len(layers),
        "products": used,
        "same": sum(same(*pair) for pair in zip(sent, computed, strict=True)),
        "unrounded": sum(not same(q, quantize(unrounded(x), q.format)) for q, x in zip(sent, layers.values())),
        "backward": all(any(same(w, q) for q in forward) for w in backward) and len(backward) >= used - 2,
        "between": between,
        "after": after,
    }


def apart(joint, rows: list[int]) -> list:
    """The codes of the layers whose rows lie below each other in `joint`: the next ones of `rows`."""
    sizes = []
    while sum(sizes) < len(joint.values):
        sizes.append(rows[len(sizes)])
    per_block = len(joint.values) // len(joint.scale)
    parts = zip(joint.values.split(sizes), joint.scale.split([size // per_block for size in sizes]), strict=True)
    return [replace(joint, values=values, scale=scale) for values, scale in parts]


def same(left, right) -> bool:
    return left.values.view(torch.uint8).equal(right.values.view(torch.uint8)) and left.scale.equal(right.scale)


def unrounded(layer) -> Tensor:
    """The weight with its adapter, all of it as the optimizer holds it."""
    weight = getattr(layer, "base_layer", layer).weight.full_tensor()
    if not hasattr(layer, "lora_A"):
        return weight
    a, b = (part["default"].weight.full_tensor() for part in (layer.lora_A, layer.lora_B))
    return weight + layer.scaling["default"] * (b @ a)
