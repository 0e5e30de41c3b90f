"""An embedded engine of a model, and an independent quantized policy to compare it with."""

import torch
from accelerate import Accelerator
from tiny import tiny_tokenizer

from trl_quant.formats import fake_quantize_activation, quantize
from trl_quant.rollout import TransformersEngine


PROMPTS = [[72, 101, 108], [50, 43, 50, 61, 32, 7], [9]]


def engine(model, precision, **kwargs):
    kwargs.setdefault("max_completion_length", 12)
    return TransformersEngine(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=tiny_tokenizer(),
        precision=precision,
        **kwargs,
    )


def reference(model, precision):
    """An independent quantized policy: dequantized float32 weights, inputs quantized by a hook, no cache."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            if precision == "bf16":
                module.weight.data = module.weight.data.bfloat16().float()
                continue
            module.weight.data = quantize(module.weight.data, precision).dequantize(torch.float32)
            module.register_forward_pre_hook(lambda _, args: (fake_quantize_activation(args[0], precision),))
    return model
