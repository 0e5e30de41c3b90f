"""What runs inside vLLM's worker, on the model itself: reached through `LLM.collective_rpc` and `LLM.apply_model`.

The engine runs in the trainer's process, so these functions may take iterators and return tensors. What each of them
works around was measured on vLLM 0.26 (CUDA) and 0.31 (CPU).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.torch_utils import set_default_torch_dtype


# precision -> names of the classes that run a linear layer in it: vLLM's online method or the scheme of a checkpoint
METHODS = {
    "bf16": ("UnquantizedLinearMethod",),
    "fp8": ("Fp8PtpcOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
    "fp8_tensor": ("Fp8PerTensorOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
    "fp8_block": ("Fp8PerBlockOnlineLinearMethod", "CompressedTensorsW8A8Fp8"),
    "int8": ("CompressedTensorsW8A8Int8",),
    "nvfp4": ("CompressedTensorsW4A4Fp4",),
    "mxfp4": ("CompressedTensorsW4A4Mxfp4",),
}
# weight strategy of compressed-tensors that tells the three kinds of FP8 apart
FP8_STRATEGY = {"fp8": "channel", "fp8_tensor": "tensor", "fp8_block": "block"}
# 4-bit kernels that leave activations alone; the others quantize them, which `formats` does not
WEIGHT_ONLY_KERNELS = ("Marlin", "Humming", "Emulation")


def linear_layers(model: nn.Module) -> dict[str, LinearBase]:
    """vLLM's linear layers by the name that they have without LoRA's wrappers around them."""
    return {module.prefix: module for module in model.modules() if isinstance(module, LinearBase)}


def kernels(model: nn.Module) -> dict[str, tuple[str, str]]:
    """For each linear layer, the class that decides how it runs and the kernel that runs it (`""` for a plain GEMM)."""
    return {name: tuple(type(x).__name__ if x else "" for x in _method(layer)) for name, layer in linear_layers(model).items()}


def _method(layer: LinearBase) -> tuple[object, object]:
    method = getattr(layer, "scheme", None) or layer.quant_method
    return method, next((getattr(method, n) for n in ("kernel", "fp8_linear") if hasattr(method, n)), None)


def check_kernels(model: nn.Module, precision: str) -> str:
    """
    Describes the kernels of the decoder's linear layers, `112 x CompressedTensorsW8A8Int8 (CutlassInt8...)`.

    Raises:
        `RuntimeError`: if any of them does not run in `precision`.
    """
    counts, wrong = Counter(), []
    for name, layer in linear_layers(model).items():
        method, kernel = _method(layer)
        description = f"{type(method).__name__} ({type(kernel).__name__})" if kernel else type(method).__name__
        counts[description] += 1
        if ".layers." in f".{name}" and not _runs_in(precision, method, kernel):
            wrong.append(f"{name}: {description}")
    summary = ", ".join(f"{count} x {description}" for description, count in counts.items())
    if wrong:
        raise RuntimeError(
            f"vLLM did not build the engine that `rollout_precision`={precision!r} asks for: {len(wrong)} linear layers "
            f"run otherwise, such as {'; '.join(wrong[:3])}. Expected: {' or '.join(METHODS[precision])}."
        )
    return summary


def _runs_in(precision: str, method: object, kernel: object) -> bool:
    name, kernel_name = type(method).__name__, type(kernel).__name__
    if name not in METHODS[precision]:
        return False
    if precision in ("nvfp4", "mxfp4"):
        return kernel_name.startswith(WEIGHT_ONLY_KERNELS)
    if name == "CompressedTensorsW8A8Fp8" and str(getattr(method, "strategy", "")) != FP8_STRATEGY[precision]:
        return False
    return not (precision.startswith("fp8") and kernel_name.startswith("Marlin"))  # W8A16 where W8A8 was asked for


def parts_of(model: nn.Module, precision: str) -> dict[str, tuple[str, ...]]:
    """
    The policy's linear layers that the engine holds in `precision`, each with the layers that it is fused with (itself
    included): `...q_proj -> (...q_proj, ...k_proj, ...v_proj)`.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    parts = {}
    for name, layer in linear_layers(model).items():
        if _runs_in(precision, *_method(layer)):
            parent, _, leaf = name.rpartition(".")
            group = tuple(f"{parent}.{part}" for part in packed.get(leaf, [leaf]))
            parts |= dict.fromkeys(group, group)
    return parts


def reload(worker, stream: Iterable[tuple[str, Tensor]]) -> None:
    """
    Replaces all weights by those of `stream`, in vLLM's bracketed reload, under which captured CUDA graphs stay valid.

    Raises:
        `RuntimeError`: if the stream ends without weights for some module.
    """
    model = worker.get_model()
    load_weights, loaded = model.load_weights, set()

    def load(weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
        names = load_weights(weights)
        loaded.update(names or ())
        return names

    model.load_weights = load
    try:
        # The reload builds tensors of the default type, which vLLM only sets around the first load.
        with set_default_torch_dtype(worker.vllm_config.model_config.dtype):
            worker.reload_weights(weights_iterator=stream)
            _refresh_tied_head(model)
    finally:
        del model.load_weights
    if loaded:
        # By module: what a quantized layer holds is not what was loaded into it. Parameters are counted once, so a
        # tied head, whose weight is the embedding's, misses nothing.
        owners = {name.rpartition(".")[0] for name in loaded}
        owned = {name.rpartition(".")[0].removesuffix(".base_layer") for name, _ in model.named_parameters()}
        if missing := {owner for owner in owned if "lora" not in owner and not owner.startswith(tuple(owners))}:
            raise RuntimeError(f"the policy streamed no weights for {', '.join(sorted(missing)[:4])}")


def _refresh_tied_head(model: nn.Module) -> None:
    """On CPU a tied head keeps a packed copy of the embedding, which a reload leaves as it was."""
    head = getattr(model, "lm_head", None)
    head = getattr(head, "base_layer", head)
    if head is not None and head.weight.is_cpu and _is_tied(model):
        head.quant_method.process_weights_after_loading(head)


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def keep_onednn_scales(model: nn.Module) -> None:
    """
    On CPUs without AMX an INT8 layer gives oneDNN a raw pointer to its scales, and a reload frees the tensor behind
    it: wrong numbers or NaN afterwards. The kernel keeps it alive instead.
    """
    for layer in linear_layers(model).values():
        kernel = _method(layer)[1]
        if hasattr(kernel, "process_weights_for_onednn"):
            kernel.process_weights_for_onednn = partial(_process_and_keep, kernel)


def _process_and_keep(kernel, layer: nn.Module) -> None:
    type(kernel).process_weights_for_onednn(kernel, layer)
    kernel.kept_scale = getattr(layer, kernel.layer_param_names[1]).data  # not a parameter, which a reload would drop


def parameters(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of the named parameters."""
    own = dict(model.named_parameters())
    return {name: own[name].detach().clone() for name in names}


def parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@torch.no_grad()
def write_parameters(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Writes parameters in place, where captured CUDA graphs read them."""
    own = dict(model.named_parameters())
    for name, value in values.items():
        own[name].copy_(value)


def push_adapter(worker, adapter_id: int, tensors: dict[str, Tensor], config: dict) -> None:
    """Makes `tensors` (PEFT's names) the LoRA adapter `adapter_id`, in place of any before it; no files."""
    manager = worker.model_runner.lora_manager._adapter_manager
    mapper = getattr(worker.get_model(), "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        adapter_id,
        tensors,
        PEFTHelper.from_dict(config),
        device="cpu" if worker.device.type == "cpu" else str(worker.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper,
    )
    manager.remove_adapter(adapter_id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter_id)
