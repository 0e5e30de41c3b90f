"""Merges a LoRA adapter on disk into the tensors of a checkpoint, one at a time. PEFT computes BA."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.names import clean_name
from .files import Stored


CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Fields of a LoRA config with which merging is more than W + BA
BEYOND_A_SUM = ("use_dora", "fan_in_fan_out", "lora_bias", "target_parameters", "trainable_token_indices")
BEYOND_A_SUM += ("layer_replication", "alora_invocation_tokens")
INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # which leave the base as it was
NAME = "default"


@dataclass(frozen=True)
class Adapter:
    """
    The layers and parameters that an adapter changes.

    Attributes:
        layers (`dict[str, LoraLayer]`): PEFT's layer, by the name of the weight (out, in) that it adds to.
        replaced (`dict[str, torch.Tensor]`): Parameters that were trained whole (`modules_to_save`, biases), by name.
    """

    layers: dict[str, LoraLayer]
    replaced: dict[str, Tensor]

    @torch.no_grad()
    def delta(self, name: str) -> Tensor:
        """BA times its scale, (out, in)."""
        return self.layers[name].get_delta_weight(NAME)

    def merged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors with the adapter, added in the wider type and rounded once to the checkpoint's."""
        result = {}
        for name, tensor in tensors.items():
            if name in self.layers:
                tensor = torch.add(tensor, self.delta(name).to(tensor.device), out=torch.empty_like(tensor))
            elif name in self.replaced:
                tensor = self.replaced[name].to(tensor)
            result[name] = tensor
        return result

    def check(self, heads: dict[str, Stored], packed: bool) -> None:
        """
        Raises `ValueError` if the adapter belongs to another base.

        Args:
            heads (`dict[str, Stored]`): The base's tensors.
            packed (`bool`): Whether its linear layers are quantized.
        """
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in self.layers.items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in self.replaced.items()}
        for name, shape in shapes.items():
            found = heads.get(name)
            if found is None and packed and name in self.layers and f"{name}_packed" in heads:
                continue  # of the shape that its config says, which PEFT compared
            if found is None:
                raise ValueError(
                    f"`--adapter`: it changes {name}, which the base has no tensor of. A head that is tied to the "
                    "embedding cannot take an adapter of its own; otherwise give its own base with `--model`."
                )
            if found.shape != shape:
                raise ValueError(
                    f"`--adapter`: it is for a base whose {name} has shape {shape}, but this one's has {found.shape}. "
                    "Give its own base with `--model`."
                )


def read_adapter_config(path: Path) -> dict:
    """
    Reads adapter_config.json of an adapter that can be merged into weights.

    Raises:
        ValueError: There is no adapter, its weights are missing, or its merge is more than W + BA.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(f"`--adapter`: {path} has no {CONFIG}; give the directory of a PEFT adapter.")
    config = json.loads((path / CONFIG).read_text())
    if not any((path / name).is_file() for name in WEIGHTS):
        raise ValueError(f"`--adapter`: {path} has {CONFIG}, but neither {' nor '.join(WEIGHTS)}.")
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"`--adapter`: only LoRA can be exported, and {path} holds {kind}.")
    if found := [field for field in BEYOND_A_SUM if config.get(field)]:
        raise ValueError(
            f"`--adapter`: with {', '.join(f'`{field}`={config[field]!r}' for field in found)} merging is more than "
            "W + BA. Merge with PEFT's `merge_and_unload`."
        )
    if (init := config.get("init_lora_weights")) not in INITS:
        raise ValueError(
            f"`--adapter`: `init_lora_weights`={init!r} changed the base as well, which {path} does not hold. Merge "
            "with PEFT's `merge_and_unload` where it was trained."
        )
    return config


def load_adapter(path: Path, skeleton: PreTrainedModel) -> Adapter:
    """
    Loads an adapter onto a model that has no memory for its weights.

    Raises:
        ValueError: It does not fit the model, or adapts layers that are not linear.
    """
    ends = (skeleton.get_input_embeddings(), skeleton.get_output_embeddings())
    tied = getattr(skeleton.config.get_text_config(), "tie_word_embeddings", False)
    shared = {f"{name}.weight" for name, module in skeleton.named_modules() if tied and module in ends}
    try:
        model = PeftModel(skeleton, PeftConfig.from_pretrained(path), NAME, low_cpu_mem_usage=True)
    except ValueError as error:  # such as target modules that the base lacks
        raise ValueError(f"`--adapter`: {path} does not fit the base {type(skeleton).__name__}: {error}") from error
    weights = {
        key: tensor.float() for key, tensor in load_peft_weights(path, device="cpu").items()
    }  # as PEFT casts them
    layers: dict[str, LoraLayer] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        linear = isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
        if not linear or layer.lora_variant:
            raise ValueError(f"`--adapter`: {clean_name(name)} is adapted by {type(layer).__name__}; only W + BA is.")
        for part, linears in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            found, needed = weights.pop(f"{name}.{part}.weight", None), linears[NAME].weight.shape
            if found is None or found.shape != needed:
                what = "is missing" if found is None else f"has shape {tuple(found.shape)}"
                raise ValueError(
                    f"`--adapter`: {path} does not fit the base {type(skeleton).__name__}: {part} of "
                    f"{clean_name(name)} {what}, and {tuple(needed)} is needed."
                )
            linears[NAME].weight = nn.Parameter(found, requires_grad=False)
        layers[f"{clean_name(name)}.weight"] = layer
    replaced = {clean_name(name): tensor for name, tensor in weights.items()}
    if whole := [name for name in replaced if name in shared]:
        raise ValueError(f"`--adapter`: it replaces {whole[0]}, which the base shares between embedding and head.")
    return Adapter(layers, replaced)
