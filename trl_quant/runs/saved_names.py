"""Weights that transformers saves under other names than those of the model's modules.

For many vision-language models and mixtures of experts, `save_pretrained` writes the names of older versions, such as
`language_model.model.norm.weight` for `model.language_model.norm.weight`, and `from_pretrained` converts them. The
`Trainer` that resumes does not (5.17): it leaves out each weight whose name it does not know, with a warning.
"""

from pathlib import Path

from accelerate.utils import is_peft_model
from torch import nn
from transformers.core_model_loading import revert_weight_conversion


def saves_other_names(model: nn.Module) -> bool:
    """Says whether `model` is saved under other names than its own. Adapters are saved under their own."""
    if is_peft_model(model):
        return False
    own = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    return not own.keys() >= revert_weight_conversion(model, own).keys()


def load_as_saved(model: nn.Module, checkpoint: str | Path) -> None:
    """Loads the weights of a checkpoint into `model`, which is of the same class, as `from_pretrained` reads them."""
    loaded = type(model).from_pretrained(checkpoint, dtype="auto")
    model.load_state_dict(loaded.state_dict())
