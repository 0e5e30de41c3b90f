"""The vLLM engine in the trainer's process: in one precision, with the policy's weights of this very step.

TRL builds vLLM's `LLM` and calls it; this class adds the arguments that make it a quantized one, and does the sync,
the noise and the sleeping itself. vLLM is imported where it is used, so that this package imports without it.
"""

import logging
from contextlib import contextmanager
from functools import partial

import torch
import trl.generation.vllm_generation as vllm_generation
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AutoConfig

from ..noise import noised_norms
from .vllm_base import VLLMBase
from .vllm_support import (
    ONLINE,
    adapter_arguments,
    check_architecture,
    check_device,
    check_prepared,
    layout_arguments,
)


logger = logging.getLogger(__name__)

ADAPTER_ID = 1


class VLLMEngine(VLLMBase):
    """
    vLLM in `precision`, colocated with the trainer, behind TRL's generation interface.

    A sync is one bracketed reload of the whole model, streamed tensor by tensor in the model's order and quantized on
    the way, after which the engine equals one that was started from a checkpoint of the same weights, bit for bit.
    With `lora_sync="adapter"` the quantized base stays as it was loaded and only A and B travel.

    Parameters:
        engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's `LLM`; `model` among them is what it starts on, such as a prepared checkpoint.
        lora_sync (`str`, *optional*, defaults to `"merge"`): How an adapter reaches the engine: `"merge"`, `"adapter"`.
        sleep_level (`int`, *optional*, defaults to `2`): vLLM's sleep level, where TRL's `enable_sleep_mode` is set.

    Attributes:
        checkpoint_dtype (`torch.dtype`): Of the weights that the engine starts on.
        llm (`vllm.LLM`): The engine itself. With `lora_sync="adapter"` its `generate` samples with the adapter.
    """

    def __init__(
        self,
        *args,
        engine_kwargs: dict | None = None,
        lora_sync: str = "merge",
        sleep_level: int = 2,
        enable_sleep_mode: bool = False,
        **kwargs,
    ):
        self.engine_kwargs = dict(engine_kwargs or {})
        self.lora_sync = lora_sync
        self.sleep_level = sleep_level if enable_sleep_mode else 0
        self._asleep: set[str] = set()  # vLLM's tags of what must be woken
        self._pushed: dict[str, Tensor] = {}
        # TRL knows sleep level 2 alone, which would lose an adapter's base: it is told that there is no sleep mode.
        super().__init__(*args, enable_sleep_mode=False, **kwargs)

    # Start

    def _init_vllm(self):
        check_device(self.precision, self.sleep_level > 0)
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
        start = self.engine_kwargs.get("model", self.model.name_or_path)
        config = AutoConfig.from_pretrained(start, trust_remote_code=self.trust_remote_code)
        check_architecture(config, self.model_impl)
        self.checkpoint_dtype = config.dtype or torch.bfloat16
        prepared = check_prepared(config, self.precision)
        self._plan_stream(prepared)
        arguments = {"dtype": "bfloat16", "quantization": ONLINE.get(self.precision), **self.engine_kwargs}
        arguments["enable_sleep_mode"] = self.sleep_level > 0
        if self.in_checkpoint_layout:
            arguments |= layout_arguments(self.precision, self.ignore, self.accelerator.device, prepared, arguments)
        if self.lora_sync == "adapter":
            arguments |= adapter_arguments(self.model, arguments)
        return arguments

    # Sync

    def _send(self):
        self._wake("weights")
        if self.lora_sync == "adapter":
            self._push_adapter()
        else:
            from . import vllm_worker

            self.llm.collective_rpc(vllm_worker.reload, kwargs={"stream": self.stream()})
            self.sync_metrics = self.drift.metrics()
            self._noise_is_gone()
        self.llm.reset_prefix_cache()
        self.stale_cache = _cached_blocks(self.llm) > 0

    def _push_adapter(self):
        from . import vllm_worker

        tensors = self._adapter_tensors()
        rank = max(len(tensor) for name, tensor in tensors.items() if name.endswith("lora_A.weight"))
        config = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        self.llm.collective_rpc(vllm_worker.push_adapter, args=(ADAPTER_ID, tensors, config))
        self._pushed = tensors

    def _adapter_tensors(self) -> dict[str, Tensor]:
        """A and B of each layer; B times the adapter's scale, which may differ from layer to layer."""
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

    @torch.no_grad()
    def update_since_sync(self) -> float:
        if self.lora_sync == "merge":
            return super().update_since_sync()
        now = self._adapter_tensors()
        update = torch.stack([(now[name] - sent).norm() for name, sent in self._pushed.items()]).norm()
        return (update / torch.stack([sent.norm() for sent in self._pushed.values()]).norm()).item()

    # Noise

    def _read_norms(self) -> dict[str, Tensor]:
        from . import vllm_worker

        (names,) = self.llm.apply_model(vllm_worker.parameter_names)
        norms = noised_norms(self._model_type, names)
        return self.llm.apply_model(partial(vllm_worker.parameters, names=norms))[0]

    def _write_norms(self, values: dict[str, Tensor]) -> None:
        from . import vllm_worker

        self.llm.apply_model(partial(vllm_worker.write_parameters, values=values))
        self.llm.reset_prefix_cache()

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

    def _be_ready(self) -> bool:
        self._require_alive()
        woken = bool(self._asleep)
        self._wake("weights")
        super()._be_ready()
        self._wake("kv_cache")
        return woken

    # Generate

    def generate(self, prompts, images, num_generations, profiler=None):
        output = super().generate(prompts, images, num_generations, profiler)
        self._sleep()
        return output

    def logps(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[Tensor]]:
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        # Greedily, which leaves the random state of the run's samples alone
        continuing = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
        sampled = self.llm.generate(inputs, continuing, use_tqdm=False)
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = self.llm.generate(inputs, scoring, use_tqdm=False)
        sequences, logps = [], []
        for ids, continued, prompt in zip(prompts, sampled, scored, strict=True):
            completion = continued.outputs[0]
            sequences.append([*ids, *completion.token_ids])
            steps = [*prompt.prompt_logprobs[1:], *completion.logprobs]
            logps.append(torch.tensor([step[t].logprob for t, step in zip(sequences[-1][1:], steps, strict=True)]))
        return sequences, logps

    def limits(self) -> tuple[int, int]:
        config = self.llm.llm_engine.vllm_config
        return config.cache_config.block_size, config.model_config.max_model_len


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
        "`vllm_enable_sleep_mode=True`, so that engine and trainer take turns; or take a `rollout_precision` with "
        "fewer bits."
    )
