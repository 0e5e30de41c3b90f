"""Samples that share prefixes, in one row and each alone, and the gradients of both."""

import numpy as np
import torch
from packed_rows import WINDOWS
from tiny import FAMILIES, tiny_model
from trl.experimental.async_grpo.packing import TreeRow
from trl.trainer.utils import add_fused_lm_head


CAN_GROW = [family for family in FAMILIES if family != "gemma2"]  # which caps logits


def samples() -> list[np.ndarray]:
    """
    Two groups whose samples share a prompt longer than the windows, one of them a whole turn more, and a sample that
    shares nothing.
    """
    draw = np.random.default_rng(0).integers
    first, second = draw(3, 250, 14), draw(3, 250, 9)
    turn = np.concatenate([first, draw(3, 250, 6)])
    ends = [(first, 5), (turn, 11), (turn, 3), (second, 8), (second, 1), (draw(3, 250, 2), 12)]
    return [np.concatenate([start, draw(3, 250, length)]) for start, length in ends]


def row() -> dict[str, torch.Tensor]:
    tree = TreeRow()
    for number, ids in enumerate(samples()):
        mask = np.ones(len(ids), dtype=np.int64)
        mask[0] = 0
        given = {"old_log_probs": np.zeros(len(ids), dtype=np.float32), "advantage": 0.0}
        tree.add({"input_ids": ids, "completion_mask": mask, "group_id": number, **given})
    packed = tree.pack()
    assert len(packed["input_ids"]) < 0.8 * sum(map(len, samples()))  # something is shared
    return packed


def model_of(family: str, attention: str, **settings):
    model = tiny_model(family, **WINDOWS.get(family, {}) | settings)
    add_fused_lm_head(model, temperature=0.9)
    model.set_attn_implementation(attention)
    return model.train()


def weights(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count)


def together(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log-probabilities of all samples' tokens from one row, and the gradients of their weighted sum."""
    packed = row()
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    given = {name: packed[name].to(model.device) for name in names}
    longest, path = packed["tree_max_seqlens"].tolist()
    ids, positions, labels = (
        packed[name][None].to(model.device) for name in ("input_ids", "position_ids", "shift_labels")
    )
    outputs = model(
        input_ids=ids,
        position_ids=positions,
        shift_labels=labels,
        fused_lm_head=True,
        tree_max_seqlen_q=longest,
        tree_max_seqlen_k=path,
        **given,
    )
    return with_gradients(model, outputs.log_probs.flatten()[packed["token_index"].to(model.device)])


def alone(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same, from each sample by itself."""
    found = []
    for ids in samples():
        tokens = torch.tensor(ids, device=model.device)[None]
        outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, fused_lm_head=True)
        found.append(outputs.log_probs.flatten())
    return with_gradients(model, torch.cat(found))


def with_gradients(model, logps) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    (logps.float() * weights(len(logps)).to(logps.device)).sum().backward()
    return logps.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def apart(left, right) -> float:
    """The largest distance of log-probabilities, and of gradients as a share of theirs."""
    logps = (left[0] - right[0]).abs().max().item()
    grads = [((left[1][name] - grad).norm() / grad.norm().clamp(min=1e-6)).item() for name, grad in right[1].items()]
    return max(logps, *grads)
