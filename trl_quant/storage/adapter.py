"""Merges a LoRA adapter on disk into the tensors of a checkpoint, one tensor at a time. PEFT computes BA."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.families import EXPERT, EXPERT_PARTS
from ..models.linears import is_mixtures
from ..models.names import clean_name
from ..reading import read_json, reading
from .experts import NamesOnDisk
from .files import Stored
from .identity import MODEL_FILES
from .manifest import check_read, run_of


logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# If one of these fields of a LoRA config is set, the merged weight is not W + BA
BEYOND_A_SUM = ("use_dora", "fan_in_fan_out", "lora_bias", "trainable_token_indices", "layer_replication")
BEYOND_A_SUM += ("alora_invocation_tokens",)
# Values of `init_lora_weights` that leave the base weights unchanged
INITS = (True, False, None, "gaussian", "eva", "orthogonal")
NAME = "default"
REFERENCE = "ref"  # TRL's copy of an adapter as it was, for the KL term


@dataclass(frozen=True)
class OfTensor:
    """
    The adapter of one matrix in a tensor (experts, out, in) that PEFT adapts as a whole, or of a router.

    Attributes:
        wrapper (`ParamWrapper`): PEFT's layer, with A (experts * rank, in) and B (out, rank * experts).
        expert (`int`): The expert's number.
        part, parts (`int`): Number of the matrix, and how many of an expert the tensor joins: gate, then up.
    """

    wrapper: ParamWrapper
    expert: int = 0
    part: int = 0
    parts: int = 1

    @property
    def in_features(self) -> int:
        return self.wrapper.in_features

    @property
    def out_features(self) -> int:
        return self.wrapper.out_features // self.parts

    def get_delta_weight(self, name: str) -> Tensor:
        """Returns s B A of this matrix, (out, in), as PEFT's `get_delta_weight` does for all of the tensor."""
        wrapper, experts = self.wrapper, self.wrapper.num_experts
        a = wrapper.lora_A[name].weight.unflatten(0, (experts, -1))[self.expert]  # (rank, in)
        b = wrapper.lora_B[name].weight.unflatten(1, (-1, experts))[..., self.expert]  # (out, rank)
        return b.chunk(self.parts)[self.part] @ a * wrapper.scaling[name]


@dataclass(frozen=True)
class Adapter:
    """
    The layers and parameters that an adapter changes.

    Attributes:
        layers (`dict[str, LoraLayer | OfTensor]`): Name on disk of an adapted weight (out, in) -> PEFT's layer.
        replaced (`dict[str, torch.Tensor]`):
            Name on disk -> parameter that was trained in full (`modules_to_save`, biases).
    """

    layers: dict[str, LoraLayer | OfTensor]
    replaced: dict[str, Tensor]

    @torch.no_grad()
    def delta(self, name: str) -> Tensor:
        """Returns the scaled BA of a weight, (out, in)."""
        return self.layers[name].get_delta_weight(NAME)

    def merged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the adapter to a checkpoint's tensors, in the wider type, and rounds once to the checkpoint's type."""
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
        Raises `ValueError` if the adapter was trained on another base.

        Args:
            heads (`dict[str, Stored]`): The base's tensors.
            packed (`bool`): Whether the base's linear layers are quantized.
        """
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in self.layers.items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in self.replaced.items()}
        for name, shape in shapes.items():
            found = heads.get(name)
            if found is None and packed and name in self.layers and f"{name}_packed" in heads:
                continue  # PEFT has compared the shape that the base's config gives
            if found is None:
                raise ValueError(
                    f"`--adapter`: it changes {name}, which the base does not have. A head that is tied to the "
                    "embedding cannot take an adapter of its own; otherwise give the adapter's own base with `--model`."
                )
            if found.shape != shape:
                raise ValueError(
                    f"`--adapter`: it is for a base whose {name} has shape {shape}, but here it has {found.shape}. "
                    "Give the adapter's own base with `--model`."
                )


def active_adapters(model: nn.Module) -> list[str]:
    """Returns the names of the adapters that some layer of a model computes with, in order."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    names = {name for layer in layers for name in layer.active_adapters}
    return sorted(names | set(model.active_adapters if isinstance(model, PeftModel) else ()))


def tell_others(path: Path) -> None:
    """Warns of further adapters in a checkpoint that does not say which were active, because one alone is read."""
    others = sorted(file.parent.name for file in path.glob(f"*/{CONFIG}") if file.parent.name != REFERENCE)
    if others and run_of(path) is None:
        logger.warning(
            "%s holds the adapters %s beside its own, and does not say which of them were active. Its own alone is "
            "read.",
            path,
            others,
        )


def read_adapter_config(path: Path) -> dict:
    """
    Reads the adapter_config.json of an adapter, and checks that the adapter can be merged into weights.

    Raises:
        ValueError: There is no adapter, its weights are missing, or the merged weight is not W + BA.
    """
    if not (path / CONFIG).is_file():
        raise ValueError(f"`--adapter`: {path} has no {CONFIG}; give the directory of a PEFT adapter.")
    config = read_json(path / CONFIG)
    if not any((path / name).is_file() for name in WEIGHTS):
        raise ValueError(f"`--adapter`: {path} has {CONFIG}, but neither {' nor '.join(WEIGHTS)}.")
    check_read(path, MODEL_FILES, "`--adapter`")
    tell_others(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"`--adapter`: only LoRA can be exported, and {path} holds {kind}.")
    found = [f"`{field}`={config[field]!r}" for field in BEYOND_A_SUM if config.get(field)]
    if found:
        raise ValueError(
            f"`--adapter`: with {', '.join(found)} merging is more than W + BA. Merge with PEFT's `merge_and_unload`."
        )
    init = config.get("init_lora_weights")
    if init not in INITS:
        raise ValueError(
            f"`--adapter`: `init_lora_weights`={init!r} changed the base as well, which {path} does not hold. Merge "
            "with PEFT's `merge_and_unload` where it was trained."
        )
    return config


def load_adapter(path: Path, skeleton: PreTrainedModel, heads: dict[str, Stored]) -> Adapter:
    """
    Loads an adapter onto a model whose own weights take no memory.

    Args:
        path (`Path`): The adapter's directory.
        skeleton ([`~transformers.PreTrainedModel`]): The base's model on the meta device, which PEFT changes.
        heads (`dict[str, Stored]`): The base's tensors.

    Raises:
        ValueError: The adapter does not fit the model, or adapts what is neither a linear layer nor of a mixture.
    """
    on_disk, embeddings = NamesOnDisk(skeleton, heads), skeleton.get_input_embeddings().weight
    ends = [name for name, param in skeleton.named_parameters(remove_duplicate=False) if param is embeddings]
    shared = {on_disk.of(name) for name in ends} if len(ends) > 1 else set()
    try:
        with reading(path / CONFIG):
            config = PeftConfig.from_pretrained(path)
        model = PeftModel(skeleton, config, NAME, low_cpu_mem_usage=True)
    except ValueError as error:  # for example, the base lacks the target modules
        raise ValueError(f"`--adapter`: {path} does not fit the base {type(skeleton).__name__}: {error}") from error
    # In FP32, because PEFT casts an adapter that it loads to FP32
    with reading(path):
        weights = {key: tensor.float() for key, tensor in load_peft_weights(path, device="cpu").items()}
    layers: dict[str, LoraLayer | OfTensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        changed = clean_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
        linear = isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
        of_tensor = isinstance(layer, ParamWrapper) and is_mixtures(changed)
        if not (of_tensor or (linear and not isinstance(layer, ParamWrapper))) or layer.lora_variant:
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
        layers |= _matrices(on_disk, changed, layer) if of_tensor else {on_disk.of(changed): layer}
    replaced = {on_disk.of(clean_name(name)): tensor for name, tensor in weights.items()}
    tied_and_replaced = [name for name in replaced if name in shared]
    if tied_and_replaced:
        raise ValueError(
            f"`--adapter`: it replaces {tied_and_replaced[0]}, which the base shares between embedding and head."
        )
    return Adapter(layers, replaced)


def _matrices(names: NamesOnDisk, name: str, wrapper: ParamWrapper) -> dict[str, OfTensor]:
    """Returns the adapters of a tensor's matrices by their names on disk; one for a router."""
    experts, parts = wrapper.num_experts, EXPERT_PARTS.get(name.rpartition(".")[2], 1)
    numbers = torch.arange(experts * parts).view(experts, parts, 1)  # of the matrices, as the tensor has them
    found = {}
    of_tensor = numbers if EXPERT.fullmatch(name) else numbers[0]
    for on_disk, number in names.stream([(name, of_tensor)]):
        if on_disk.endswith(".weight"):  # and no buffer of a router
            expert, part = divmod(number.item(), parts)
            found[on_disk] = OfTensor(wrapper, expert, part, parts)
    return found
