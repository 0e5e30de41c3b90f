"""Mixtures of experts computed by loops over tokens and experts, with given experts; and choices that are made up."""

import torch
import torch.nn.functional as F
from tiny import MIXTURES, tiny_model


# family -> settings with which its weights of experts are normalized, or are not
GATES = {
    "qwen3_moe": ({"norm_topk_prob": True}, {"norm_topk_prob": False}),
    "qwen2_moe": ({"norm_topk_prob": False},),
    "mixtral": ({},),
    "glm4_moe": ({"norm_topk_prob": True}, {"norm_topk_prob": False}),
}
ALL_GATES = [(family, settings) for family in MIXTURES for settings in GATES[family]]


def mixture_of(family: str, seed: int = 5, **settings):
    """A mixture whose biases of choice, in GLM-4, are large enough to decide."""
    model = tiny_model(family, seed=seed, **settings)
    for block in blocks_of(model).values():
        if hasattr(block.gate, "e_score_correction_bias"):
            block.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.1, -0.3]))
    return model


def blocks_of(model) -> dict[int, torch.nn.Module]:
    """Layer -> its MLP, where that has experts."""
    layers = model.get_decoder().layers
    return {number: layer.mlp for number, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}


def slow_scores(family: str, logits):
    """The score of each expert (E,) from which one token's weights are taken."""
    if family == "glm4_moe":
        return 1 / (1 + torch.exp(-logits))
    return torch.exp(logits) / torch.exp(logits).sum()


def slow_choice(family: str, block, logits) -> list[int]:
    """The experts of the largest scores of one token; in GLM-4, of scores and biases."""
    scores = slow_scores(family, logits)
    if family == "glm4_moe":
        scores = scores + block.gate.e_score_correction_bias.to(scores)
    return scores.argsort(descending=True)[: block.gate.top_k].tolist()


def slow_weights(family: str, settings: dict, logits, chosen: list[int]) -> list:
    """The weights of one token's experts."""
    scores = slow_scores(family, logits)
    weights = [scores[expert] for expert in chosen]
    if family == "mixtral" or settings.get("norm_topk_prob"):
        total = sum(weights)
        weights = [weight / total for weight in weights]
    return [1.5 * weight for weight in weights] if family == "glm4_moe" else weights


def compute_slowly(model, family: str, settings: dict, experts) -> None:
    """
    Replaces the forward pass of each MLP that has experts. `experts` (B, S, L, k) are fixed; where they are negative,
    the token's own are the largest.
    """
    for number, block in blocks_of(model).items():
        block.forward = _slow_forward(block, family, settings, experts[:, :, number].flatten(0, 1).tolist())


def _slow_forward(block, family, settings, fixed):
    def forward(hidden):
        flat, rows = hidden.reshape(-1, hidden.shape[-1]), []
        for x, chosen, logits in zip(flat, fixed, block.gate(flat)[0], strict=True):
            if min(chosen) < 0:
                chosen = slow_choice(family, block, logits.detach())
            y = 0
            for expert, weight in zip(chosen, slow_weights(family, settings, logits, chosen), strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                y = y + weight * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
            if family == "qwen2_moe":
                y = y + torch.sigmoid(block.shared_expert_gate.weight @ x) * block.shared_expert(x)
            if family == "glm4_moe":
                y = y + block.shared_experts(x)
            rows.append(y)
        return torch.stack(rows).view_as(hidden)

    return forward


def made_up_choices(ids, mask, layers: int, experts: int = 4, chosen: int = 2, seed: int = 0):
    """
    Made-up experts (B, S, L, k) of each token, which depend on the token and those before it, so that equal prompts
    have equal ones. Padding and the last token of a row have none.
    """
    made = torch.full((*ids.shape, layers, chosen), -1, dtype=torch.int16)
    for row in range(len(ids)):
        places = mask[row].nonzero()[:, 0].tolist()
        so_far = seed
        for place in places[:-1]:
            so_far = (31 * so_far + int(ids[row, place]) + 1) % 1_000_003
            generator = torch.Generator().manual_seed(so_far)
            for layer in range(layers):
                made[row, place, layer] = torch.randperm(experts, generator=generator)[:chosen]
    return made


def chosen_again(model, family: str, ids: list[int]):
    """The sets of experts (T, E), as booleans for each layer with experts, that a model's routers choose for a text."""
    found, hooks = {}, []

    def look(number, block):
        def hook(_, args, output):
            rows = []
            weight = block.gate.weight.float().cpu()
            for x in args[0].reshape(-1, args[0].shape[-1]).float().cpu():
                choice = slow_choice(family, block, weight @ x)
                rows.append(torch.isin(torch.arange(block.gate.num_experts), torch.tensor(choice)))
            found[number] = torch.stack(rows)

        return hook

    for number, block in blocks_of(model).items():
        hooks.append(block.gate.register_forward_hook(look(number, block)))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def as_sets(experts, layer: int, count: int = 4):
    """Indices (T, L, k) of a layer as booleans (T, E)."""
    return F.one_hot(experts[:, layer].long(), count).sum(1).bool()


def slow_balance(logits: list, mask):
    """
    The load-balancing loss of Switch Transformers over all layers: E sum_e f_e P_e, of padded rows; `logits` (B S, E)
    for each layer, `mask` (B, S).
    """
    experts, counted = logits[0].shape[1], mask.flatten().tolist()
    shares, probabilities, total = torch.zeros(experts), 0, 0
    for layer in logits:
        for row, counts in zip(layer, counted, strict=True):
            if counts:
                p = torch.exp(row) / torch.exp(row).sum()
                shares[p.argsort(descending=True)[:2]] += 1
                probabilities, total = probabilities + p, total + 1
    return experts * ((shares / total) * (probabilities / total)).sum()
