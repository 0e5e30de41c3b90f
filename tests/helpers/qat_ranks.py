"""Two ranks that train all weights in 4 bits: held whole by DDP and ZeRO-2, or in the parts that FSDP2 shards."""

import os
from pathlib import Path

import torch
from fsdp_ranks import gap, log, trained, whole
from torch import Tensor
from torch.distributed.tensor import DTensor


def train(precision: str, tuning: str, path: Path) -> dict:
    """
    One rank: three steps, and how they compare with three of the same policy held whole, and with a resumed run.
    `tuning` is "full", or "rounded" for weights that FSDP2 gathers in BF16.
    """
    sharded = "FSDP_VERSION" in os.environ  # of the launch; `trained` switches FSDP off for single runs
    bf16 = {"bf16": True, "gradient_checkpointing": True} if tuning == "rounded" else {}
    ours = trained(precision, "full", path / "ours", sharded, **bf16)
    end = whole(ours)
    sums = {name: tensor.double().sum().item() for name, tensor in end.items()}
    found = {"log": log(ours), "weights": sums} | codes(ours, precision, end)
    found["sharded"] = all(isinstance(param, DTensor) for param in ours.model.parameters())
    found["moved"] = sum(not torch.equal(ours.start[name], tensor) for name, tensor in end.items())
    found["prepared"] = prepared(ours, precision, path)
    if tuning == "full":
        resumed = whole(trained(precision, "full", path / "ours", sharded, resume=True))
        found["resumed"] = all(tensor.equal(resumed[name]) for name, tensor in end.items())
    if sharded and tuning == "full":
        other = trained(precision, "full", path / "other", sharded=False)
        found |= {"other": log(other), "gap": gap(end, whole(other), other.start)}
    return found


def codes(trainer, precision: str, end: dict[str, Tensor]) -> dict:
    """
    How many layers there are; of how many the engine gets the codes of a forward pass, of how many these are also those
    of a backward pass, those of a checkpoint of the weights as they are, and of the weights rounded to BF16.
    """
    from trl_quant.formats import global_scale, quantize
    from trl_quant.layers import weight_only
    from trl_quant.models.linears import fused_with

    product, seen = weight_only.weight_only_product, {True: [], False: []}

    def multiply(x, bias, values, scale, shared, *rest):
        seen[rest[-1]].append(bytes_of(values, scale, shared))
        return product(x, bias, values, scale, shared, *rest)

    sent = codes_sent(trainer, precision)
    weight_only.weight_only_product = multiply
    trainer.model.train()
    trainer.model(input_ids=torch.arange(8).view(1, -1), use_cache=False).logits.sum().backward()
    trainer.model.zero_grad()
    weight_only.weight_only_product = product

    def stored(name: str, dtype: torch.dtype) -> tuple:
        fused = [end[f"{other}.weight"].to(dtype) for other in fused_with(name) if f"{other}.weight" in end]
        shared = global_scale(*fused) if precision == "nvfp4" else None
        q = quantize(end[f"{name}.weight"].to(dtype), precision, shared)
        return bytes_of(q.values, q.scale, q.global_scale)

    return {
        "layers": len(sent),
        "forward": sum(q in seen[True] for q in sent.values()),
        "backward": sum(q in seen[False] for q in sent.values()),
        "stored": sum(q == stored(name, torch.float32) for name, q in sent.items()),
        "rounded": sum(q == stored(name, torch.bfloat16) for name, q in sent.items()),
    }


def codes_sent(trainer, precision: str) -> dict[str, tuple]:
    """Layer -> the bytes of the codes and scales that its engine gets. Collective."""
    engine = trainer.vllm_generation.engine
    sent = dict(engine.quantized_as_trained(engine.policy_stream()))
    found = {name: sent[f"{name}.weight"] for name in engine.weights.unified(precision)}
    return {name: bytes_of(q.values, q.scale, q.global_scale) for name, q in found.items()}


def prepared(trainer, precision: str, path: Path) -> int:
    """Of how many layers `trl-quant prepare` writes the codes that the engine gets, from the saved policy."""
    from trl_quant.cli import main as command
    from trl_quant.storage.files import read_heads, read_tensors, weight_files
    from trl_quant.storage.layout import read_quantized

    sent = codes_sent(trainer, precision)
    trainer.save_model(path / "saved")
    if trainer.accelerator.is_main_process:
        arguments = {"--model": path / "saved", "--format": precision, "--output": path / "packed"}
        command(["prepare", *(str(word) for pair in arguments.items() for word in pair)])
    trainer.accelerator.wait_for_everyone()
    heads = read_heads(weight_files(path / "packed"))
    read = read_quantized(read_tensors(heads, list(heads), "cpu"), precision, torch.float32)
    return sum(bytes_of(q.values, q.scale, q.global_scale) == sent[name] for name, q in read.items())


def bytes_of(*tensors: Tensor | None) -> tuple:
    given = [None if tensor is None else tensor.detach().cpu().contiguous().view(torch.uint8) for tensor in tensors]
    return tuple(tensor if tensor is None else tensor.numpy().tobytes() for tensor in given)
