"""A checkpoint whose weights have other names than the model's is loaded whole."""

import pytest
import torch
from readers import reader
from tiny import FAMILIES, MIXTURES, tiny_model

from trl_quant.runs.saved_names import load_as_saved, saves_other_names


def made(family: str, seed: int):
    return reader("gemma3", seed=seed)[0] if family == "reader" else tiny_model(family, seed=seed)


@pytest.mark.parametrize("family", [*MIXTURES, "reader"])
def test_each_weight_is_loaded(tmp_path, family):
    saved, model = made(family, 1), made(family, 2)
    saved.save_pretrained(tmp_path)
    assert saves_other_names(model)
    load_as_saved(model, tmp_path)
    expected = saved.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    assert not any(torch.equal(weight, expected[name]) for name, weight in made(family, 2).named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_other_models_are_saved_under_their_own_names(family):
    assert not saves_other_names(made(family, 1))
