"""What every rollout engine of ours shares: TRL's generation interface, and the stream of the policy's weights.

Both engines are TRL's `VLLMGeneration` with another back end, so `GRPOTrainer` drives them as it drives vLLM.
A sync streams clean weights; the noise (AQN) is laid on the copy's norms just before it samples.
"""

import math
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.distributed.tensor import DTensor
from trl.generation.vllm_generation import VLLMGeneration


@dataclass(frozen=True)
class RolloutNoise:
    """
    Adaptive quantization noise of one generation (QeRL eq. 7-8).

    Parameters:
        sigma (`float`): Standard deviation; 0 means the clean weights.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
    """

    sigma: float = 0.0
    seed: int = 0
    step: int = 0


class RolloutEngine(VLLMGeneration):
    """
    Base of the rollout engines. It takes the arguments that TRL gives to its `VLLMGeneration`, and:

    Parameters:
        precision (`str`):
            Number format of the copy, a name in `config.PRECISIONS`.

    Attributes:
        noise (`RolloutNoise`):
            Set by the trainer before each generation.
        multimodal_fields (`dict`):
            What the processor made of the prompts' images (`pixel_values` and the like); set by the trainer as well.
        sync_metrics (`dict[str, float]`):
            What the last sync measured: `weights/normalized_update` = ||W_t - W_{t-1}|| / ||W_t|| (QuRL eq. 13) and
            `weights/normalized_quantization_error` = ||Q(W_t) - W_t|| / ||W_t|| (eq. 14), over the quantized layers.
    """

    def __init__(self, *args, precision: str, **kwargs):
        self.precision = precision
        self.noise = RolloutNoise()
        self.multimodal_fields: dict = {}
        self.sync_metrics: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        self._is_adapted = is_peft_model(self.model)
        trained = [
            self._clean_name(f"{name}.weight")
            for name, module in self.model.named_modules()
            if isinstance(module, BaseTunerLayer)
            or (isinstance(module, nn.Linear) and module.weight.requires_grad and ".lora_" not in name)
        ]
        self.drift = WeightDrift(trained)

    def _iter_named_params(self):
        """
        The policy's parameters in the model's order as `(name, tensor)`, full, dense and with adapters merged.

        Adapters are merged as PEFT does it, but into stand-ins, one layer at a time, so that the trainer's base weights
        are never written: TRL merges and unmerges in place, which in BF16 moves the base a little at every sync.
        """
        if not self._is_adapted or self._dist.fsdp_version == 1:
            yield from super()._iter_named_params()
            return

        adapted, seen = None, set()
        for path, module in self.model.named_modules():
            if adapted is not None and path.startswith(adapted):
                continue
            if isinstance(module, BaseTunerLayer):
                adapted = f"{path}."
                for leaf, tensor in self._merge(module).items():
                    yield self._clean_name(f"{path}.{leaf}"), tensor
                continue
            for leaf, param in module._parameters.items():
                name = f"{path}.{leaf}"
                if param is None or id(param) in seen or self.model.prefix in name or ".original_module." in name:
                    continue
                seen.add(id(param))
                with self._dist.gather_params([param]):
                    yield self._clean_name(name), self._dense(module, param)

    def _clean_name(self, name: str) -> str:
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."])

    def state_dict(self) -> dict:
        """What a checkpoint must hold for a resumed run to log what an unbroken one logs. Collective."""
        return {"normalized_update": self.drift.update_since_sync(self._iter_named_params())}

    def load_state_dict(self, state: dict) -> None:
        self.drift.resumed_update = state["normalized_update"]

    def _full(self, param: nn.Parameter) -> torch.Tensor:
        if isinstance(param, DTensor):  # FSDP2; gathering needs the accelerator also where parameters are offloaded
            return (param.to(self.accelerator.device) if param.is_cpu else param).full_tensor()
        return param.data

    def _dense(self, module: nn.Module, param: nn.Parameter) -> torch.Tensor:
        """`param` of `module` in full; a 4- or 8-bit base of bitsandbytes is dequantized."""
        full = self._full(param)
        return full if full.is_floating_point() else dequantize_module_weight(module).data

    @torch.no_grad()
    def _merge(self, layer: BaseTunerLayer) -> dict[str, torch.Tensor]:
        """The parameters of an adapted layer's base with its adapters merged in: new tensors, by name."""
        base = layer.get_base_layer()
        with self._dist.gather_params(list(layer.parameters()) if self._dist.is_zero3 else []):
            if is_sum(layer):  # what PEFT's merge computes, without its bookkeeping, which takes longer than the sum
                weight = dequantize_module_weight(base).data if not base.weight.is_floating_point() else base.weight
                for adapter in layer.active_adapters:
                    # In one pass: summed in the wider type, rounded to the base's
                    weight = torch.add(weight, delta_weight(layer, adapter), out=torch.empty_like(weight))
                return {n: weight if n == "weight" else p.data for n, p in base.named_parameters()}
            own = [
                (module._parameters, name, param)
                for module in layer.modules()
                for name, param in module._parameters.items()
                if param is not None
            ]
            try:
                for parameters, name, param in own:
                    full = self._full(param)
                    parameters[name] = nn.Parameter(full.clone() if parameters is base._parameters else full, False)
                layer.merge()
                return {name: param.data for name, param in base.named_parameters()}
            finally:
                layer.merged_adapters.clear()
                for parameters, name, param in own:
                    parameters[name] = param


def is_sum(layer: BaseTunerLayer) -> bool:
    """Whether merging a layer's adapters adds a matrix each to its weight, held in full here, and nothing else."""
    weight = layer.get_base_layer().weight
    if not isinstance(layer, LoraLayer):
        return not weight.is_floating_point()  # PEFT cannot merge other adapters into a copy of a 4- or 8-bit base
    plain = isinstance(layer.get_base_layer(), nn.Linear) and not isinstance(weight, DTensor) and not layer.lora_variant
    return plain and all(a in layer.lora_A and not layer.lora_bias.get(a, False) for a in layer.active_adapters)


def delta_weight(layer: BaseTunerLayer, adapter: str) -> torch.Tensor:
    """PEFT's `get_delta_weight`, less its pass over the product of B and A where scaling B is the same bit for bit."""
    if isinstance(layer, LoraLayer) and layer.lora_B[adapter].weight.dtype == torch.float32:
        scaling = layer.scaling[adapter]
        if math.frexp(scaling)[0] == 0.5:  # a power of two
            return (layer.lora_B[adapter].weight * scaling) @ layer.lora_A[adapter].weight
    return layer.get_delta_weight(adapter)


class WeightDrift:
    """
    QuRL's two norms over one sync (eq. 13, 14): how far the weights moved, how far quantizing them moves them.

    Measured are about `MAX_LAYERS` of the trained layers, drawn by their names, and of large ones the leading rows
    (whole 128-row blocks), at most `MAX_ELEMENTS` values, of which a copy is kept until the next sync. A resumed run
    has no such copy: it takes the update from its checkpoint.

    Parameters:
        trained (`Collection[str]`): Names of the weights that training moves.
    """

    MAX_LAYERS = 32
    MAX_ELEMENTS = 2**18

    def __init__(self, trained: Collection[str]):
        stride = max(1, len(trained) // self.MAX_LAYERS)
        self.names = {name for name in trained if zlib.crc32(name.encode()) % stride == 0}
        self.resumed_update: float | None = None
        self._previous: dict[str, torch.Tensor] = {}
        self.forget()

    def forget(self) -> None:
        """As new: the next sync is the first."""
        self._previous.clear()
        self._updates, self._errors, self._weights = [], [], []  # norms, one of each layer

    def measures(self, name: str) -> bool:
        """Whether the weight called `name` is one of those that are measured."""
        return name in self.names

    def rows(self, weight: torch.Tensor) -> int:
        """Number of leading rows of `weight` that are measured."""
        if weight.numel() <= self.MAX_ELEMENTS:
            return weight.shape[0]
        return max(128, self.MAX_ELEMENTS // weight[0].numel() // 128 * 128)

    def add(self, name: str, weight: torch.Tensor, dequantized: torch.Tensor) -> None:
        """Counts the leading rows of a layer, `dequantized` of the copy and the same rows of `weight`."""
        weight = weight[: len(dequantized)].detach()
        if name in self._previous:
            self._updates.append(_norm(weight - self._previous[name]))
        self._errors.append(_norm(dequantized.to(weight.dtype) - weight))
        self._weights.append(_norm(weight))
        self._previous[name] = weight.clone()

    def metrics(self) -> dict[str, float]:
        """The norms since the last call, relative to the weights'; the update only where there was a sync before."""
        metrics = {}
        if self._errors:
            metrics["weights/normalized_quantization_error"] = _ratio(self._errors, self._weights)
        if self._updates:
            metrics["weights/normalized_update"] = _ratio(self._updates, self._weights)
        elif self.resumed_update is not None:
            metrics["weights/normalized_update"] = self.resumed_update
        self._updates, self._errors, self._weights = [], [], []
        return metrics

    def update_since_sync(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> float | None:
        """The update that the next sync will see, for a checkpoint; `None` before the first sync."""
        updates, weights = [], []
        for name, tensor in named_params:  # to its end also where nothing is known: gathering is collective
            if name in self._previous:
                previous = self._previous[name]
                tensor = tensor[: len(previous)].detach().to(previous.device)
                updates.append(_norm(tensor - previous))
                weights.append(_norm(tensor))
        return _ratio(updates, weights) if self._previous else None


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float32)


def _ratio(norms: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Norm of all tensors of which `norms` are the norms, relative to that of `others`."""
    first, second = (torch.stack(x).double().square().sum().sqrt().item() for x in (norms, others))
    return first / max(second, 1e-30)
