"""Masked diffusion in slow loops, one row and one token at a time, without padding, as a reference for the package,
which this file does not import.

`one_step_logps` is d1's estimate, `denoised` LLaDA's sampling in blocks, `llada_logits` LLaDA's own forward pass,
`dream_logits` Dream's, and `prefix_held` such a pass with keys and values of an earlier one.
"""

import math

import torch


# Llama's and Qwen2's names -> LLaDA's
LLADAS = {"embed_tokens": "wte", "norm": "ln_f", "lm_head": "ff_out", "input_layernorm": "attn_norm"}
LLADAS |= {"post_attention_layernorm": "ff_norm", "o_proj": "attn_out", "gate_proj": "ff_proj", "down_proj": "ff_out"}
LLADAS |= {name: name for name in ("q_proj", "k_proj", "v_proj", "up_proj")}


def one_step_logps(model, prompt, is_masked, completion, length, mask_token, temperature=1.0, logits_of=None):
    """
    log f(o_k | q' M ... M) for each token of one completion; with a gradient if the model's weights have one.
    `logits_of(tokens)` gives what a model predicts for each token, where that is not its output at the token's place.
    """
    shown = [mask_token if masked else token for token, masked in zip(prompt, is_masked, strict=True)]
    tokens = shown + [mask_token] * length
    logits = model(input_ids=torch.tensor([tokens])).logits[0] if logits_of is None else logits_of(tokens)
    found = []
    for k, token in enumerate(completion):
        scores = logits[len(prompt) + k] / temperature
        found.append(scores[token] - scores.logsumexp(0))
    return torch.stack(found)


def denoised(model, prompts, length, block_length, tokens_per_step, mask_token, temperature, seed=0, logits_of=None):
    """
    The canvas of each prompt after all blocks, and at which step of its block each token was written. `logits_of(row,
    tokens, before, step)` gives the logits of a row's tokens, of which `before` stand before the block.
    """

    def whole(row, tokens, before, step):
        return model(input_ids=torch.tensor([tokens])).logits[0]

    logits_of = logits_of or whole
    torch.manual_seed(seed)
    texts, steps = [[mask_token] * length for _ in prompts], [[None] * length for _ in prompts]
    for start in range(0, length, block_length):
        places = range(start, start + block_length)
        for step in range(block_length // tokens_per_step):
            vocabulary = model.config.vocab_size
            uniform = torch.rand(len(prompts), block_length, vocabulary, dtype=torch.float64).tolist()
            for row, prompt in enumerate(prompts):
                logits = logits_of(row, prompt + texts[row], len(prompt) + start, step).tolist()
                candidates = []
                for k in places:
                    if steps[row][k] is not None:
                        continue
                    scores = logits[len(prompt) + k]
                    scores[mask_token] = -math.inf
                    token = drawn(scores, temperature, uniform[row][k - start])
                    total = sum(math.exp(score) for score in scores)
                    candidates.append((math.exp(scores[token]) / total, k, token))
                for _, k, token in sorted(candidates, reverse=True)[:tokens_per_step]:
                    texts[row][k], steps[row][k] = token, step
    return texts, steps


def drawn(scores, temperature, uniform):
    """The argmax of exp(score) / (-log u)^T, which is a draw from the softmax of score / T."""
    best, found = -math.inf, None
    for token, score in enumerate(scores):
        value = math.exp(score) / (-math.log(uniform[token])) ** temperature
        if value > best:
            best, found = value, token
    return found


def llada_logits(tensors, config, tokens):
    """LLaDA's forward pass for one row of tokens, from the tensors of its checkpoint, in double precision."""
    return llada_pass(tensors, config, tokens)[0]


def dream_logits(tensors, config, tokens):
    """Dream's predictions for each place of a row: the output at the place before; at the first place its own."""
    return moved(llada_pass(*under_lladas_names(tensors, config), tokens)[0])


def moved(logits):
    return torch.cat([logits[:1], logits[:-1]])


def under_lladas_names(tensors, config):
    """The tensors and the config of a Llama or a Qwen2 under LLaDA's names."""
    found = {}
    for name, tensor in tensors.items():
        place, leaf = name.rsplit(".", 1)
        if ".layers." in place:
            _, _, block, *parts = place.split(".")
            place = f"blocks.{block}.{LLADAS[parts[-1]]}"
        else:
            place = LLADAS[place.split(".")[-1]]
        found[f"model.transformer.{place}.{leaf}"] = tensor
    fields = {"n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "n_layers": "num_hidden_layers"}
    fields |= {"d_model": "hidden_size", "weight_tying": "tie_word_embeddings"}
    known = {name: config[other] for name, other in fields.items()} | {"rms_norm_eps": config["rms_norm_eps"]}
    theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    return found, known | {"rope_theta": theta}


def prefix_held(tensors, config, shift=0):
    """
    `logits_of` for `denoised`: at the first step of a block a forward pass, at the others the same with the keys and
    values of all places before the block's first output as they were at the first. With `shift` 1 an output predicts
    the next token.
    """
    held = {}

    def logits_of(row, tokens, before, step):
        logits, pairs = llada_pass(tensors, config, tokens, held[row] if step else None)
        if not step:
            count = before - shift
            held[row] = [[(k[:count], v[:count]) for k, v in of_block] for of_block in pairs]
        return moved(logits) if shift else logits

    return logits_of


def llada_pass(tensors, config, tokens, held=None):
    """
    The logits of a row of tokens, and the keys and values of each block and head. The keys and values of the first
    tokens are those `held`, if there are any.
    """
    weights = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in tensors.items()}
    heads, kv_heads = config["n_heads"], config["n_kv_heads"]
    size = config["d_model"] // heads
    x = torch.stack([weights["wte.weight"][token] for token in tokens])
    pairs = []
    for block in range(config["n_layers"]):
        start = f"blocks.{block}."
        own = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
        own = {name.removesuffix(".weight"): tensor for name, tensor in own.items()}
        y = rms(x, own["attn_norm"], config["rms_norm_eps"])
        q, k, v = (y @ own[name].T + own.get(f"{name}.bias", 0.0) for name in ("q_proj", "k_proj", "v_proj"))
        pairs.append([])
        for head in range(kv_heads):
            columns = slice(head * size, (head + 1) * size)
            key, value = rotated(k[:, columns], config["rope_theta"]), v[:, columns].clone()
            if held is not None:
                old_key, old_value = held[block][head]
                key[: len(old_key)], value[: len(old_value)] = old_key, old_value
            pairs[-1].append((key, value))
        parts = []
        for head in range(heads):
            key, value = pairs[-1][head // (heads // kv_heads)]
            query = rotated(q[:, head * size : (head + 1) * size], config["rope_theta"])
            parts.append((query @ key.T / math.sqrt(size)).softmax(-1) @ value)  # no mask: both directions
        x = x + torch.cat(parts, 1) @ own["attn_out"].T
        y = rms(x, own["ff_norm"], config["rms_norm_eps"])
        gate = y @ own["ff_proj"].T
        x = x + (gate * gate.sigmoid() * (y @ own["up_proj"].T)) @ own["ff_out"].T
    head = weights["wte.weight"] if config["weight_tying"] else weights["ff_out.weight"]
    return rms(x, weights["ln_f.weight"], config["rms_norm_eps"]) @ head.T, pairs


def rms(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotated(x, theta):
    """Rotary embedding by halves: x_i and x_{i + d/2} turn by position * theta^(-2i/d)."""
    half = x.shape[1] // 2
    turned = x.clone()
    for position in range(len(x)):
        for i in range(half):
            angle = position * theta ** (-i / half)
            a, b = x[position, i], x[position, i + half]
            turned[position, i] = a * math.cos(angle) - b * math.sin(angle)
            turned[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned
