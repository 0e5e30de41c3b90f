"""A plain forward pass of transformers' own head, which the tests compare trainers with."""

import torch


def logits_of(model, batch) -> torch.Tensor:
    """Logits of the places of the completions `(B, T, V)`, from transformers' own head, with their gradient."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    keep = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    return logits[:, -keep - 1 : -1]


def drawn_logps(logits, batch) -> torch.Tensor:
    """Log-probabilities of the drawn tokens `(B, T)`."""
    return logits.log_softmax(-1).gather(2, batch["completion_ids"][..., None]).squeeze(2)


def plain_logps(model, batch) -> torch.Tensor:
    """Log-probabilities of the completions' tokens `(B, T)`, with their gradient."""
    return drawn_logps(logits_of(model, batch), batch)
