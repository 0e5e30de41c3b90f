"""The table of transformers' norms and MLPs that our kernels stand in for: each computes what Llama's does."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from tiny import FAMILIES as TINY
from tiny import tiny_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from trl_quant.models.families import FAMILIES, families_with, is_gated_mlp, is_rms_norm


CONFIG = SimpleNamespace(
    hidden_size=32, intermediate_size=64, hidden_act="silu", mlp_bias=False, use_bias=False, pretraining_tp=1
)
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def found(family: str, name: str) -> type[nn.Module]:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


@pytest.mark.parametrize("family", families_with("norm"))
def test_norms(family):
    own, theirs = found(family, FAMILIES[family].norm)(32, eps=1e-5), LlamaRMSNorm(32, eps=1e-5)
    assert is_rms_norm(own) and not is_gated_mlp(own)
    own.weight.data = theirs.weight.data = torch.linspace(0.5, 2, 32)
    assert torch.equal(own(X), theirs(X))
    assert torch.equal(own(X.bfloat16()), theirs(X.bfloat16()))


@pytest.mark.parametrize("family", families_with("mlp"))
def test_mlps(family):
    own, theirs = found(family, FAMILIES[family].mlp)(CONFIG), LlamaMLP(CONFIG)
    assert is_gated_mlp(own) and not is_rms_norm(own)
    theirs.load_state_dict(own.state_dict())
    assert torch.equal(own(X), theirs(X))


@pytest.mark.parametrize("family", TINY)
def test_tiny_models(family):
    """All norms of the families whose weight is a factor, none of the others."""
    norms = [module for name, module in tiny_model(family).named_modules() if name.endswith("norm")]
    assert len(norms) > 4 and {is_rms_norm(norm) for norm in norms} == {not FAMILIES[family].offset}


def test_what_is_no_such_class():
    class SameCode(nn.Module):
        """Llama's forward pass under another name: transformers' next version may make it another function."""

        forward = LlamaRMSNorm.forward

    class Sharded(LlamaRMSNorm):
        """As FSDP makes one."""

    class Other(LlamaRMSNorm):
        def forward(self, x):
            return x

    assert not is_rms_norm(SameCode()) and not is_rms_norm(nn.RMSNorm(32)) and not is_rms_norm(Other(32))
    assert is_rms_norm(Sharded(32))
    patched = LlamaRMSNorm(32)
    patched.forward = patched.forward
    assert not is_rms_norm(patched)
