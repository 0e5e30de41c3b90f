"""Gives a small model what large ones have: channels whose activations are far larger than the others.

    python benchmarks/study/outliers.py runs/study/models/3-digits-0.33 runs/study/models/3-digits-0.33-outliers-64 64

Norm gains and rows of `up_proj` are multiplied, and the columns of the linear layers behind them divided, by a power
of two: the model computes the same function, to the bit. What shares a scale with such a channel, a token's INT8
activations, is left with few of its 255 steps. That is INT8's difficulty in models of billions of parameters, which
models of this study's size do not have by themselves.
"""

import shutil
import sys
from math import frexp
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


CHANNELS = 2  # of each input
FILES = ("tokenizer.json", "tokenizer_config.json", "eval.jsonl", "train.jsonl")  # the last one is written last


@torch.no_grad()
def add_outliers(model: PreTrainedModel, factor: float, seed: int = 0) -> None:
    """Multiplies `CHANNELS` of the inputs of q, k, v, of gate, up, and of down, in each layer, in place.

    Raises:
        ValueError: for a factor that is no power of two, with which the function would change.
    """
    if frexp(factor)[0] != 0.5:
        raise ValueError(f"`outliers`={factor:g} is not a power of two.")
    generator = torch.Generator().manual_seed(seed)
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for source, behind in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            (mlp.up_proj, (mlp.down_proj,)),
        ):
            chosen = torch.randperm(len(source.weight), generator=generator)[:CHANNELS]
            source.weight[chosen] *= factor
            for linear in behind:
                linear.weight[:, chosen] /= factor


if __name__ == "__main__":
    source, target, factor = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(source)
    add_outliers(model, factor)
    model.save_pretrained(target)
    for name in FILES:
        shutil.copy(source / name, target / name)
