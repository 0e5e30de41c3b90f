"""Stand-ins for the kernels of a hybrid that keep the sequences of a packed row apart: loops over the sequences."""

import importlib

import torch


# family -> transformers' module, and its function that carries a state over a sequence
STATES = {
    "qwen3_5_text": ("qwen3_5", "torch_chunk_gated_delta_rule"),
    "qwen3_next": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "falcon_h1": ("falcon_h1", "mamba2_chunk_scan"),
}


def kernels_that_keep_borders(monkeypatch, family: str, convolution: bool = True, state: bool = True) -> None:
    """Replaces a family's convolution, its function that carries a state, or both."""
    name, function = STATES[family]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if convolution:
        monkeypatch.setattr(module, "causal_conv1d_fn", _convolution(module.causal_conv1d_fn))
    if state:
        wrap = _scan if family == "falcon_h1" else _delta_rule
        monkeypatch.setattr(module, function, wrap(getattr(module, function)))
    # Falcon-H1's two in one, from transformers 5.24 on, of which `None` asks for both
    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", lambda *args, **kwargs: None, raising=False)


def _lengths(seq_idx: torch.Tensor) -> list[int]:
    return seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()


def _convolution(swallows):
    def convolution(x, *args, seq_idx=None, **kwargs):  # (1, channels, tokens)
        parts = [x] if seq_idx is None else x.split(_lengths(seq_idx), 2)
        return torch.cat([swallows(part, *args, **kwargs) for part in parts], 2)

    return convolution


def _delta_rule(swallows):
    def delta_rule(*args, cu_seqlens=None, seq_idx=None, **kwargs):  # (1, tokens, ...)
        if cu_seqlens is None:
            return swallows(*args, **kwargs)
        gates = {name: kwargs.pop(name) for name in ("g", "beta")}
        parts = zip(*(x.split(cu_seqlens.diff().tolist(), 1) for x in (*args, *gates.values())), strict=True)
        outputs = [swallows(*part[:3], g=part[3], beta=part[4], **kwargs)[0] for part in parts]
        return torch.cat(outputs, 1), None

    return delta_rule


def _scan(swallows):
    def scan(x, dt, A, B, C, seq_idx=None, **kwargs):
        if seq_idx is None:
            return swallows(x, dt, A, B, C, **kwargs)
        parts = zip(*(tensor.split(_lengths(seq_idx), 1) for tensor in (x, dt, B, C)), strict=True)
        return torch.cat([swallows(a, b, A, c, d, **kwargs) for a, b, c, d in parts], 1)

    return scan
