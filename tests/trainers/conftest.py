"""The two models that the tests of PPO begin with."""

import pytest


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("policy") / "model", seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory, policy) -> dict[str, str]:
    """A policy, and a critic whose value head is not zero."""
    import torch
    from transformers import AutoModelForTokenClassification

    path = tmp_path_factory.mktemp("models")
    critic = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        critic.score.weight.copy_(torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 8)
        critic.score.bias.fill_(0.25)
    critic.save_pretrained(path / "critic")
    return {"policy": policy, "critic": str(path / "critic")}
