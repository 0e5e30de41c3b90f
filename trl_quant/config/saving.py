"""The checks of [`before_loading`] on what a run saves: transformers refuses to save some configs that it loads."""

import copy
from tempfile import TemporaryDirectory

from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig

from ..reading import reading


def read_generation_config(model, args) -> GenerationConfig:
    """Returns the generation config of a policy. For a name, it is read as `from_pretrained` reads it."""
    if not isinstance(model, str):
        return model.generation_config
    options = {"revision": (args.model_init_kwargs or {}).get("revision")}
    try:
        with reading(model):
            return GenerationConfig.from_pretrained(model, **options)
    except OSError:  # the model has no generation config of its own
        with reading(model):
            return GenerationConfig.from_pretrained(model, config_file_name="config.json", **options)


def check_savable(whose: str, *configs) -> None:
    """
    Raises `ValueError` if transformers would refuse to save a model with these configs, such as a generation config
    with a `temperature` and without `do_sample`. The run would train to its end, and save nothing.

    Args:
        whose (`str`): The model in words, for the message.
        configs ([`~transformers.PreTrainedConfig`] or [`~transformers.GenerationConfig`]): The model's configs.
    """
    for config in configs:
        try:
            with TemporaryDirectory() as directory:
                copy.deepcopy(config).save_pretrained(directory)
        except (ValueError, StrictDataclassError) as error:
            is_generation = isinstance(config, GenerationConfig)
            file = "generation_config.json" if is_generation else "config.json"
            instead = f"`model.{'generation_config' if is_generation else 'config'}`"
            raise ValueError(
                f"transformers could not save {whose} after the training. Correct its {file}, or load the model, "
                f"correct {instead} and pass the model. It says: {' '.join(str(error).split())}"
            ) from error
