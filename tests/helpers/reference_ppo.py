"""PPO in slow loops, one number at a time, as a reference for the package, which this file does not import."""

import math

import torch
from reference import mean, std, unmasked


def actions(mask, b):
    return [t for t in range(mask.shape[1]) if mask[b, t]]


def advantages(scores, values, mask, gamma, lam):
    """Generalized advantage estimation from its definition: sum_k (gamma lam)^k delta_t+k, over actions alone."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for b in range(mask.shape[0]):
        if math.isnan(scores[b]):
            continue
        steps = actions(mask, b)
        deltas = []
        for i, t in enumerate(steps):
            is_last = i == len(steps) - 1
            reward = scores[b].item() if is_last else 0.0
            after = 0.0 if is_last else values[b, steps[i + 1]].item()
            deltas.append(reward + gamma * after - values[b, t].item())
        for i, t in enumerate(steps):
            found[b, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return found


def whitened(advantages, mask):
    found, values = torch.zeros_like(advantages), [advantages[b, t].item() for b, t in unmasked(mask)]
    for b, t in unmasked(mask):
        found[b, t] = (advantages[b, t].item() - mean(values)) / math.sqrt(std(values) ** 2 + 1e-8)
    return found


def value_loss(values, old_values, returns, mask, cliprange):
    """The mean over the tokens, and the share of the clipped ones; `values` may carry a gradient."""
    losses, clips = [], []
    for b, t in unmasked(mask):
        loss = (values[b, t] - returns[b, t]) ** 2 / 2
        low, high = (old_values[b, t].item() + sign * (cliprange or math.inf) for sign in (-1, 1))
        at_bound = min(max(values[b, t].item(), low), high)
        clipped = (at_bound - returns[b, t].item()) ** 2 / 2
        if at_bound != values[b, t].item() and clipped > loss.item():
            loss = 0 * values[b, t] + clipped
            clips.append(1.0)
        losses.append(loss)
    return sum(losses) / len(losses), sum(clips) / len(losses)


def values(model, batch):
    """The value of the state before each token of the completions, from each row by itself, without padding."""
    rows = []
    for b in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b] == 1]
        completion = batch["completion_ids"][b][batch["completion_mask"][b] == 1]
        found = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1, 0]
        rows.append(torch.cat([found, found.new_zeros(batch["completion_ids"].shape[1] - len(completion))]))
    return torch.stack(rows)


def shared_values(policy, head, batch, detached=False):
    """The same of a linear head on the hidden states of a policy, which may be detached from it."""
    rows = []
    for b in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b] == 1]
        completion = batch["completion_ids"][b][batch["completion_mask"][b] == 1]
        computed = policy(input_ids=torch.cat([prompt, completion])[None], output_hidden_states=True)
        hidden = computed.hidden_states[-1][0, len(prompt) - 1 : -1]
        found = (hidden.detach() if detached else hidden) @ head.weight[0] + head.bias[0]
        rows.append(torch.cat([found, found.new_zeros(batch["completion_ids"].shape[1] - len(completion))]))
    return torch.stack(rows)


def logps(model, batch):
    """The log-probability of each token of the completions, likewise."""
    rows = []
    for b in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b] == 1]
        completion = batch["completion_ids"][b][batch["completion_mask"][b] == 1]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        found = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        rows.append(torch.cat([found, found.new_zeros(batch["completion_ids"].shape[1] - len(completion))]))
    return torch.stack(rows)
