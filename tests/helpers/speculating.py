"""vLLM's speculative decoding with n-grams, as it is on a CPU and as it should be there."""

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.v1.sample import rejection_sampler
from vllm_engines import SMALL


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTING = SMALL | {"speculative_config": NGRAM}


def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """In place of vLLM's `expand_batch_to_tokens`: each value as often as its request has drafted tokens."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts.long(), output_size=num_tokens)


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Mends vLLM on a CPU, which converts the tensor that this function fills, fills the copy, and returns memory that
    nobody has written, as temperatures, `top_k` and `top_p` of drafted tokens (seen in 0.31).
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)


def drafted_by(path) -> dict:
    """An engine's arguments with which the model at `path` drafts, whose drafts are samples."""
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    return SMALL | {"speculative_config": drafts | {"draft_sample_method": "probabilistic"}}
