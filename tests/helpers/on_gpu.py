"""How far trainer and engine are from each other on a GPU."""

import torch
from drawing import generated
from vllm_engines import PROMPTS


LORA = {"r": 16, "lora_alpha": 64, "target_modules": "all-linear", "init_lora_weights": False}


@torch.no_grad()
def logps(model, sequences: list[list[int]]) -> list[torch.Tensor]:
    found = []
    for ids in sequences:
        tokens = torch.tensor([ids], device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scored = model(tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        found.append(scored.gather(-1, tokens[:, 1:, None]).flatten().cpu())
    return found


def sampled(sampler, count: int = 16) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """`(prompts, completions, log-probabilities)` of one generation."""
    prompts, completions, found, _ = generated(sampler, PROMPTS * count)
    return prompts, completions, [torch.tensor(each).flatten() for each in found]


def mismatch(sampler, model) -> float:
    """KL k3 of the engine from the policy over what it samples, in nats a token."""
    prompts, completions, theirs = sampled(sampler)
    ours = logps(model, [prompt + ids for prompt, ids in zip(prompts, completions, strict=True)])
    d = torch.cat([own[len(p) - 1 :] - their for p, own, their in zip(prompts, ours, theirs, strict=True)])
    return (d.exp() - 1 - d).mean().item()
