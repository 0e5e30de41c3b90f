"""The vLLM engine in the trainer's process: in one precision, with the policy's weights of this very step.

TRL builds vLLM's `LLM` and calls it; this class adds the arguments that make it a quantized one, and does the sync,
the noise and the sleeping itself. vLLM is imported where it is used, so that this package imports without it.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import trl.generation.vllm_generation as vllm_generation
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoConfig

from ..formats.checkpoint import checkpoint_stream, quantizes
from ..noise import noised_norms, norm_noise
from .base import RolloutEngine, RolloutNoise
from .vllm_support import (
    ONLINE,
    adapter_arguments,
    check_architecture,
    check_precision,
    check_prepared,
    check_version,
    layout_arguments,
    quantizer_on,
)


logger = logging.getLogger(__name__)

ADAPTER_ID = 1


class VLLMEngine(RolloutEngine):
    """
    vLLM in `precision`, colocated with the trainer, behind TRL's generation interface.

    A sync is one bracketed reload of the whole model, streamed tensor by tensor in the model's order and quantized on
    the way, after which the engine equals one that was started from a checkpoint of the same weights, bit for bit.
    With `lora_sync="adapter"` the quantized base stays as it was loaded and only A and B travel.

    Parameters:
        engine_kwargs (`dict`, *optional*): Further arguments of vLLM's `LLM`.
        lora_sync (`str`, *optional*, defaults to `"merge"`): How an adapter reaches the engine: `"merge"`, `"adapter"`.
        sync_check_steps (`int`, *optional*, defaults to `50`): Syncs from one self-check to the next; 0 for none.
        sleep_level (`int`, *optional*, defaults to `2`): vLLM's sleep level, where TRL's `enable_sleep_mode` is set.

    Attributes:
        llm (`vllm.LLM`): The engine itself. With `lora_sync="adapter"` its `generate` samples with the adapter.
    """

    def __init__(
        self,
        *args,
        engine_kwargs: dict | None = None,
        lora_sync: str = "merge",
        sync_check_steps: int = 50,
        sleep_level: int = 2,
        enable_sleep_mode: bool = False,
        **kwargs,
    ):
        self.engine_kwargs = dict(engine_kwargs or {})
        self.lora_sync = lora_sync
        self.sync_check_steps = sync_check_steps
        self.sleep_level = sleep_level if enable_sleep_mode else 0
        self._asleep: set[str] = set()  # vLLM's tags of what must be woken
        self._current = False  # whether the engine holds the weights of the last sync
        self._streaming = "the first tensor"
        self._failure: str | None = None
        self._syncs_to_check = 1  # the first is checked
        self.last_check: dict | None = None
        self.stale_cache = False
        self._pushed: dict[str, Tensor] = {}
        self._clean_norms: dict[str, Tensor] = {}
        self._applied_noise = RolloutNoise()
        # TRL knows sleep level 2 alone, which would lose an adapter's base: it is told that there is no sleep mode.
        super().__init__(*args, enable_sleep_mode=False, **kwargs)

    # Start

    def _init_vllm(self):
        check_version()
        check_precision(self.precision)
        self.quantize = quantizer_on(self.accelerator.device)
        if self.sleep_level and self.on_cpu:
            raise ValueError(
                "`vllm_enable_sleep_mode`=True, but vLLM has no sleep mode on a CPU. Leave it at False; a smaller "
                "`kv_cache_memory_bytes` in `vllm_engine_kwargs` saves memory."
            )
        from vllm.lora.request import LoRARequest

        from . import vllm_worker  # also registers the loader

        with _llm_with(**self._llm_arguments()):
            try:
                super()._init_vllm()
            except (RuntimeError, ValueError, MemoryError) as error:
                raise _start_error(error, self.precision, self.model.name_or_path) from error

        (kernels,) = self.llm.apply_model(partial(vllm_worker.check_kernels, precision=self.precision))
        logger.info("vLLM samples in %s: %s.", self.precision, kernels)
        (self.product_errors,) = self.llm.apply_model(vllm_worker.int8_errors)
        if max(self.product_errors.values(), default=0.0) > 2**-7:
            logger.warning(
                "This CPU has neither VNNI nor AMX: its INT8 products saturate and are off by %s (relative, by number "
                "of inputs). INT8 samples are noisier here than elsewhere.",
                {inputs: round(error, 4) for inputs, error in self.product_errors.items()},
            )
        if self.lora_sync == "adapter":
            request = LoRARequest("policy", ADAPTER_ID, "in memory")
            self.llm.generate = partial(self.llm.generate, lora_request=request)
        self._sleep()

    def _llm_arguments(self) -> dict:
        """What is added to TRL's arguments of `LLM`, or replaces them."""
        config = AutoConfig.from_pretrained(self.model.name_or_path, trust_remote_code=self.trust_remote_code)
        check_architecture(config, self.model_impl)
        arguments = {"dtype": "bfloat16", "quantization": ONLINE.get(self.precision), **self.engine_kwargs}
        arguments["enable_sleep_mode"] = self.sleep_level > 0
        # What is no linear layer of the decoder stays as it is
        inside = set(self.policy.get_decoder().modules())
        self.ignore = [name for name, m in self.policy.named_modules() if isinstance(m, nn.Linear) and m not in inside]
        prepared = check_prepared(config, self.precision)
        self.in_checkpoint_layout = prepared or self.precision not in ("bf16", *ONLINE)
        if self.in_checkpoint_layout:
            arguments |= layout_arguments(self.precision, self.ignore, self.accelerator.device, prepared, arguments)
        if self.lora_sync == "adapter":
            arguments |= adapter_arguments(self.model, arguments)
        return arguments

    @property
    def policy(self) -> nn.Module:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def on_cpu(self) -> bool:
        return self.accelerator.device.type == "cpu"

    # Sync

    @torch.no_grad()
    def sync_weights(self):
        """
        Gives the engine the policy's current weights, without noise; fills `sync_metrics`.

        Raises:
            `RuntimeError`: if it fails, naming the tensor. vLLM cannot be used afterwards: its model is half loaded.
        """
        self._require_alive()
        self._wake("weights")
        self._streaming = "the first tensor"
        try:
            if self.lora_sync == "adapter":
                self._push_adapter()
            else:
                self._reload()
        except BaseException as error:
            self._failure = (
                f"The sync of the {self.precision} vLLM engine failed at {self._streaming}: {error}. The engine is "
                "half loaded and cannot be used any more; start the run again from its last checkpoint."
            )
            if isinstance(error, Exception):
                raise RuntimeError(self._failure) from error
            raise
        self.llm.reset_prefix_cache()
        self.stale_cache = _cached_blocks(self.llm) > 0
        self._current = True
        self._syncs_to_check = max(0, self._syncs_to_check - 1)

    def _require_alive(self):
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _reload(self):
        from . import vllm_worker

        self.llm.collective_rpc(vllm_worker.reload, kwargs={"stream": self.stream()})
        self.sync_metrics = self.drift.metrics()
        self._clean_norms.clear()
        self._applied_noise = RolloutNoise()

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under the names and in the layout that the engine loads. Collective."""
        weights = self._watched(self._iter_named_params())
        if self.in_checkpoint_layout:
            return checkpoint_stream(weights, self.precision, self.ignore, self.quantize)
        return weights

    def _watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Brings `weights` to the engine's device, and notes their names (for errors) and norms (for the metrics)."""
        for name, tensor in weights:
            self._streaming = f"`{name}`"
            tensor = tensor.to(self.accelerator.device)
            if quantizes(name, tensor, self.ignore):
                rows = tensor[: self.drift.rows(tensor)]
                quantized = (
                    rows.bfloat16() if self.precision == "bf16" else self.quantize(rows, self.precision).dequantize()
                )
                self.drift.add(name, tensor, quantized)
            yield name, tensor

    def _push_adapter(self):
        """Sends A and B; B takes the adapter's scale, which may differ from layer to layer."""
        from . import vllm_worker

        tensors = self._adapter_tensors()
        rank = max(len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A.weight"))
        config = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        self.llm.collective_rpc(vllm_worker.push_adapter, args=(ADAPTER_ID, tensors, config))
        self._pushed = tensors

    def _adapter_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                self._streaming = f"the adapter of `{name}`"
                (adapter,) = layer.active_adapters
                a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                with self._dist.gather_params([a, b]):
                    name = self._fix_param_name_to_vllm(name, extra_prefixes=["_fsdp_wrapped_module."])
                    tensors[f"{name}.lora_A.weight"] = self._full(a).clone()
                    tensors[f"{name}.lora_B.weight"] = self._full(b) * layer.scaling[adapter]
        return tensors

    def update_since_sync(self) -> float:
        """How far the policy has moved from what was last sent to the engine, relative to its norm. Collective."""
        if self.lora_sync == "merge":
            return self.drift.update_since_sync(self._iter_named_params()) or 0.0
        now = self._adapter_tensors()
        update = torch.stack([(now[name] - sent).norm() for name, sent in self._pushed.items()]).norm()
        return (update / torch.stack([sent.norm() for sent in self._pushed.values()]).norm()).item()

    # Noise

    @torch.no_grad()
    def _lay_noise(self, noise: RolloutNoise):
        """
        Lays `noise` on the engine's norms in place, from their clean weights: it never accumulates (QeRL eq. 8), and
        with sigma 0 they come back bit for bit.
        """
        if noise == self._applied_noise or noise.sigma == self._applied_noise.sigma == 0:
            return
        from . import vllm_worker

        if not self._clean_norms:
            (names,) = self.llm.apply_model(vllm_worker.parameter_names)
            norms = noised_norms(self._model_type, names)
            (self._clean_norms,) = self.llm.apply_model(partial(vllm_worker.parameters, names=norms))
        # The noise is keyed by the policy's names, which vLLM may map to others in the same order.
        keys = noised_norms(self._model_type, self._policy_names())
        noised = {
            name: norm_noise(clean, noise.sigma, noise.seed, noise.step, key)
            for key, (name, clean) in zip(keys, self._clean_norms.items(), strict=True)
        }
        self.llm.apply_model(partial(vllm_worker.write_parameters, values=noised))
        self.llm.reset_prefix_cache()
        self._applied_noise = noise

    @property
    def _model_type(self) -> str:
        return self.model.config.get_text_config().model_type

    def _policy_names(self) -> list[str]:
        prefixes = ["base_model.model.", "base_layer.", "_fsdp_wrapped_module."]
        return [
            self._fix_param_name_to_vllm(name, extra_prefixes=prefixes) for name, _ in self.model.named_parameters()
        ]

    # Sleep

    def _wake(self, tag: str):
        if tag in self._asleep:
            vllm_generation.empty_cache()  # vLLM takes its memory back outside of torch's allocator
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _sleep(self):
        if self.sleep_level:
            self.llm.sleep(level=self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            self._current = self._current and self.sleep_level == 1

    # Self-check

    @property
    def tokenizer(self):
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def check_sync(self, quick: bool = False) -> dict[str, float]:
        """Compares the engine with the policy now, both without noise; see [`~rollout.self_check.self_check`]."""
        from .self_check import self_check

        self._be_ready()
        self._lay_noise(RolloutNoise())
        metrics = self_check(self, quick)
        if not quick:
            self._syncs_to_check = self.sync_check_steps
        self.sync_metrics = {**self.sync_metrics, **metrics}
        return metrics

    # Generate

    def _be_ready(self) -> bool:
        """Wakes the engine, and syncs it where it lost the weights or never had them; whether it had been asleep."""
        self._require_alive()
        woken = bool(self._asleep)
        self._wake("weights")
        if not self._current:
            self.sync_weights()
        self._wake("kv_cache")
        return woken

    def generate(self, prompts, images, num_generations, profiler=None):
        """See TRL's `VLLMGeneration.generate`."""
        woken = self._be_ready()
        if self.sync_check_steps and (self._syncs_to_check == 0 or woken):
            self.check_sync(quick=self._syncs_to_check > 0)
        self._lay_noise(self.noise)
        output = super().generate(prompts, images, num_generations, profiler)
        self._sleep()
        return output


def _cached_blocks(llm) -> int:
    """Blocks of keys and values that the prefix cache would serve again."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    return len(manager.block_pool.cached_block_hash_to_block)


@contextmanager
def _llm_with(**arguments):
    """Context in which TRL's generation builds vLLM's `LLM` with `arguments` over its own."""
    original = vllm_generation.LLM
    vllm_generation.LLM = lambda **own: original(**own | arguments)
    try:
        yield
    finally:
        vllm_generation.LLM = original


def _start_error(error: Exception, precision: str, model: str) -> Exception:
    """The error of an engine that did not start, with what would help."""
    message = f"vLLM did not start {model} with `rollout_precision`={precision!r}: {error}"
    if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
        return RuntimeError(message)
    return ValueError(
        f"{message}\nThe engine needs more memory than it may use. Raise `vllm_gpu_memory_utilization`, or on a CPU "
        "`kv_cache_memory_bytes` in `vllm_engine_kwargs`; lower `vllm_max_model_length`; set "
        "`vllm_enable_sleep_mode=True` so that engine and trainer take turns; or take a `rollout_precision` with fewer "
        "bits."
    )
