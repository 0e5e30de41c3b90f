"""The vLLM engine in the trainer's process.

Functions import vLLM when they need it, so that this package imports without it.
"""

import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager
from functools import partial

import torch
from accelerate.utils import is_peft_model
from peft import PeftConfig
from torch import Tensor, nn
from transformers import AutoConfig

from ...models.linears import sampled_linears
from ...noise import noised_norms
from ...policy.exact.attention import Kernels
from ...precisions import PRECISIONS
from ...reading import reading
from ...run_spec import DISCARDS, EngineSpec
from ...storage.quantization import check_prepared
from ...trl_seams import empty_cache
from ..engine import Enough, Request, RolloutNoise, Samples, requests_for
from ..fingerprint import Fingerprint, fingerprint
from ..verify.kv_cache import KVCache
from ..weights import PolicyWeights
from .base import VLLMBase
from .sampling import greedy_logps, nothing_left_behind, parameters, sampled, sampling_lean
from .speculation import Drafts, counting_drafts
from .support import (
    RANK_ON_CPU,
    adapter_arguments,
    check_architecture,
    check_device,
    layout_arguments,
    multiply_as_given,
    outside_decoder,
    returns_routing_of,
    warn_of_two_copies,
)


logger = logging.getLogger(__name__)

FASTER_START = "On a CPU most of it is compilation, which `vllm_engine_kwargs={'enforce_eager': True}` leaves out."


class VLLMEngine(VLLMBase):
    """
    vLLM in `precision`, in the trainer's process.

    A sync streams tensor by tensor, in the model's order, and quantizes each tensor on the way: all tensors the first
    time and after a sleep that discards them, and otherwise those that have changed. The first sync uses vLLM's own
    reload of the whole model. Where vLLM holds tensors in the layout in which they are sent, later syncs write
    [`in_place`]; else they reload the layers whose tensors have changed. After a sync the engine equals, bit for bit,
    an engine that was started on a checkpoint of the same weights. With `lora_sync="adapter"` the quantized base stays
    as it was loaded, and only A and B are sent. If the policy is trained on that base, trainer and engine share one
    copy of it ([`one_copy`]).

    Parameters:
        engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's `LLM`. vLLM starts on the `model` among them, such as a prepared checkpoint, or
            else on the policy's own.
        lora_sync (`str`, *optional*, defaults to `"merge"`): How an adapter reaches the engine: `"merge"`, `"adapter"`.
        sleep_level (`int`, *optional*, defaults to `2`): vLLM's sleep level if `enable_sleep_mode` is set.
        exact (`bool`, *optional*, defaults to `False`):
            Whether the results for a token must not depend on the other tokens of its batch; see [`exact`].
        returns_routing (`bool`, *optional*, defaults to `False`):
            Whether vLLM is asked for the routing of experts ([`~rollout.routing`]). It returns none on a CPU.
        returns_kept (`bool`, *optional*, defaults to `False`):
            Whether vLLM is asked for what truncation left ([`~rollout.kept`]). It takes only requests with a `top_k`
            and a temperature above 0 then.

    Attributes:
        pushed (`dict[str, torch.Tensor]`): The adapter that the engine holds, with `lora_sync="adapter"`.
        llm (`vllm.LLM`): vLLM itself.
        destinations (`dict[str, torch.Tensor]` or `None`):
            The parts of vLLM's memory that hold the tensors of a sync, see [`in_place`]; empty if vLLM must reload
            them, `None` until the first sync has shown it.
        discarded (`list[tuple[torch.Tensor, torch.Tensor]]`):
            The tensors that a sleep of level 2 discards and no sync sends, with copies of them.
        kernels ([`~policy.exact.attention.Kernels`] or `None`):
            With `exact`, vLLM's kernels, which the policy uses to compute the same bits.
    """

    def __init__(
        self,
        *args,
        engine_kwargs: dict | None = None,
        lora_sync: str = EngineSpec.lora_sync,
        sleep_level: int = DISCARDS,
        exact: bool = False,
        returns_routing: bool = False,
        returns_kept: bool = False,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.returns_routing, self.returns_kept = returns_routing, returns_kept
        self.engine_kwargs = dict(engine_kwargs or {})
        self.lora_sync = lora_sync
        self.exact = exact
        self.sleep_level = sleep_level if self.vllm.enable_sleep_mode else 0
        self.pushed: dict[str, Tensor] = {}
        self._adapter_ranks: dict[str, int] = {}  # of the adapter's layers, as the engine holds them
        self._fitting: PeftConfig | None = None  # of the last adapter that was found to fit
        self.kernels: Kernels | None = None
        self.destinations: dict[str, Tensor] | None = {} if self.on_cpu else None  # CPUs pack weights
        self._asleep: set[str] = set()  # vLLM's tags of the memory that sleeps
        self.discarded: list[tuple[Tensor, Tensor]] = []
        self._group = None  # of the ranks that form one engine
        # With `lora_sync="adapter"`, fingerprints of the base's parameters when the engine started ...
        self._base_at_start: dict[str, Hashable] = {}
        # ... and of the whole base when it was last found to be unchanged
        self._unchanged_base: Hashable = None
        self.start()

    # Start

    def start_vllm(self) -> None:
        check_device(self.precision, self.sleep_level > 0)
        if self.weights.multiplies_in(self.precision):
            multiply_as_given(self.precision)
        from vllm import LLM

        from . import (
            adapter,
            experts,
            kernel_checks,
            lifetime,
            loading,  # noqa: F401, registers a loader
            one_copy,
            own_class,
            progress,
            repairs,
        )

        self._group = self._ranks_of_engine()
        arguments = self._start_arguments() | self._llm_arguments()
        try:
            told = progress.starting(FASTER_START if self.on_cpu and not arguments.get("enforce_eager") else "")
            classes = own_class.keeping_classes(self.weights.base_model)
            with one_copy.lending(self._base_to_share()), told, classes as changed:
                self.llm = lifetime.start_on_a_free_port(partial(LLM, **arguments), self.accelerator)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise lifetime.start_error(error, self.precision, self.model.name_or_path) from error
        lifetime.ends_with(self, self.llm)
        self.llm.apply_model(partial(own_class.take_subclasses, changed=changed))

        found = sampled_linears(self.weights.base_model).values()
        layers = [layer.name for layer in found if not layer.holds_experts]
        (kernels,) = self.llm.apply_model(partial(kernel_checks.check_kernels, precision=self.precision, layers=layers))
        logger.info("vLLM samples in %s: %s.", self.precision, kernels)
        (self.fused,) = self.llm.apply_model(partial(adapter.fused_layers, names=layers))
        biased = [name.removesuffix(".bias") for name in self.weights.parameters() if name.endswith(".bias")]
        self.llm.apply_model(partial(kernel_checks.check_biases, layers=biased))
        self.llm.apply_model(partial(experts.check_experts, precision=self.precision))
        if self.exact:
            from . import exact

            self.llm.collective_rpc(exact.attend_in_one_part)
            (self.kernels,) = self.llm.collective_rpc(exact.kernels)
        (self.product_errors,) = self.llm.apply_model(kernel_checks.int8_errors)
        if max(self.product_errors.values(), default=0.0) > 2**-7:
            logger.warning(
                "This CPU has neither VNNI nor AMX, so its INT8 products saturate. Their relative errors, by number of "
                "inputs, are %s. INT8 samples are noisier here than elsewhere.",
                {inputs: round(error, 4) for inputs, error in self.product_errors.items()},
            )
        started = self.llm.llm_engine.vllm_config
        if started.speculative_config is not None:
            self.drafts = Drafts()
        self.expect_caches(started.cache_config.cache_dtype, started.model_config.hf_config)
        # A policy that will be sharded has other fingerprints later. There only the self-check compares the base.
        is_on_trial = next(self.model.parameters()).is_meta  # a trial's policy gets its values later
        if self.lora_sync == "adapter" and not self.weights.is_sharded and not is_on_trial:
            self._base_at_start = self._base_fingerprints()
        if self.sleep_level == DISCARDS:
            (self.discarded,) = self.llm.apply_model(repairs.constants)
        self.rest()

    def _base_to_share(self) -> PolicyWeights | None:
        """
        Returns the policy's weights if vLLM can share the policy's frozen base, else `None`. Warns of the second copy
        if there is a frozen base that vLLM cannot share.
        """
        if not self.own_base_bytes():
            return None
        if self.lora_sync == "adapter" and "model" not in self.engine_kwargs:
            return self.weights
        if self.lora_sync == "merge":
            reason = "in vLLM the adapter is merged into it"
        else:
            reason = "vLLM has a checkpoint of its own"
        warn_of_two_copies(self.own_base_bytes(), reason)
        return None

    def _ranks_of_engine(self):
        """
        Divides the ranks into groups that each form one engine, in their order. Returns this rank's; `None` if each
        rank has an engine of its own.
        """
        size, ranks = self.vllm.tensor_parallel_size, self.accelerator.num_processes
        if ranks % size:
            raise ValueError(f"tensor_parallel_size ({size}) must divide world size ({ranks}) evenly.")
        if size == 1:
            return None
        groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
        return torch.distributed.new_subgroups_by_enumeration(groups)[0]

    def _start_arguments(self) -> dict:
        """Returns the arguments of `LLM` with which TRL starts it too."""
        size = self.vllm.tensor_parallel_size
        return {
            "model": self.model.name_or_path,
            "tensor_parallel_size": size,
            "gpu_memory_utilization": self.vllm.gpu_memory_utilization,
            "max_model_len": self.vllm.max_model_length,
            "max_num_seqs": self.vllm.max_num_seqs,
            "model_impl": self.vllm.model_impl,
            "trust_remote_code": self.vllm.trust_remote_code,
            "distributed_executor_backend": "external_launcher",
            "seed": self.accelerator.process_index // size,  # the ranks of an engine must sample the same tokens
            "max_num_batched_tokens": 4096,  # vLLM's own number may be too large for it to find the memory
            "logprobs_mode": "processed_logprobs",
        }

    def _llm_arguments(self) -> dict:
        """Returns the arguments of `LLM` that are added to those of [`_start_arguments`], or replace them."""
        arguments = dict(self.engine_kwargs)
        commit = getattr(self.model.config, "_commit_hash", None)  # the hub's revision that the policy was loaded from
        if "model" not in arguments and commit:
            arguments.setdefault("revision", commit)
        start, revision = arguments.get("model", self.model.name_or_path), arguments.get("revision")
        with reading(start):
            config = AutoConfig.from_pretrained(start, revision=revision, trust_remote_code=self.vllm.trust_remote_code)
        check_architecture(config, self.vllm.model_impl)
        self.checkpoint_dtype = config.dtype or torch.bfloat16
        prepared = check_prepared(config, self.precision)
        # A policy that trains in this precision sends its own codes and scales, because vLLM would compute others
        self.plan_stream(prepared or self.weights.multiplies_in(self.precision))
        entry = PRECISIONS[self.precision]
        of_mixture = entry.vllm.for_experts if self.has_experts else {}
        arguments = {"dtype": "bfloat16", "quantization": entry.vllm.online, **of_mixture, **arguments}
        arguments["enable_sleep_mode"] = self.sleep_level > 0
        self.returns_routing = self.returns_routing and returns_routing_of(self.weights.base_model, arguments)
        if self.returns_routing:
            arguments["enable_return_routed_experts"] = True
        if self.returns_kept:
            arguments["return_sampling_mask"] = True
        outside = outside_decoder(self.weights.base_model, config.architectures or [], self.vllm.model_impl)
        if self.on_cpu and self.vllm.tensor_parallel_size > 1:
            arguments.setdefault("worker_cls", RANK_ON_CPU)
        if self.travels_quantized:
            device = self.accelerator.device
            arguments |= layout_arguments(entry.format, self.ignore, outside, device, prepared, arguments)
        elif entry.vllm.online and outside:
            arguments["quantization_config"] = {"ignore": outside}
        from .loading import loader_arguments

        loader_options = {"wide_norms": True} if self.wide_norms else {}
        if self.exact:
            from .exact import exact_arguments

            arguments |= exact_arguments(arguments)
            loader_options["exact"] = True
        if self.lora_sync == "adapter":
            loader_options |= adapter_arguments(self.model, arguments)
            self._adapter_ranks = loader_options["adapter"]
        return arguments | loader_arguments(loader_options, arguments)

    # Sync

    def sync(self) -> None:
        """
        As [`VLLMBase.sync`].

        Raises:
            `ValueError`: With `lora_sync="adapter"`, a weight that is not sent has changed, or the engine cannot hold
                the active adapter. The engine stays as it was.
        """
        if self.lora_sync == "adapter":
            self._require_adapter_that_fits()
        if self._base_at_start:
            self._require_unchanged_base()
        super().sync()

    def _require_adapter_that_fits(self) -> None:
        """Raises `ValueError` if the engine cannot hold the active adapter: it was started for one of another form."""
        configs = [self.model.peft_config[name] for name in self.model.active_adapters]
        if len(configs) == 1 and configs[0] is self._fitting:
            return
        ranks = adapter_arguments(self.model, {})["adapter"]
        if ranks != self._adapter_ranks:
            held, found = self._adapter_ranks, self.model.active_adapters[0]
            different = [name for name in held | ranks if held.get(name) != ranks.get(name)]
            raise ValueError(
                f"`lora_sync`='adapter': the active adapter {found!r} has the rank {ranks.get(different[0], 0)} at "
                f"`{different[0]}`, and the engine was started for {held.get(different[0], 0)} ({len(different)} "
                "layers differ; 0 is none). Activate an adapter with the same layers and ranks, or use "
                "`lora_sync='merge'`."
            )
        (self._fitting,) = configs

    def _require_unchanged_base(self) -> None:
        """
        Raises `ValueError` if the base under the adapter has changed since the engine started on it. DeepSpeed may
        round the base to the engine's type, which does not count as a change.
        """
        base = dict(self.weights.outside_base())
        current = _fingerprint(*base.values())
        if current == self._unchanged_base:
            return
        before, now = self._base_at_start, self._base_fingerprints()
        changed = [name for name in now | before if now.get(name) != before.get(name)]
        if changed:
            raise ValueError(
                f"`lora_sync`='adapter' sends only the adapter, but the policy's `{changed[0]}` changed since the "
                f"engine started ({len(changed)} of {len(now)} parameters of the base did). Use `lora_sync='merge'`."
            )
        self._unchanged_base = current

    def _base_fingerprints(self) -> dict[str, Hashable]:
        """Returns the fingerprint of each parameter of the base, in the engine's type. Frozen layers never change."""
        return {
            name: _fingerprint(tensor.to(self.checkpoint_dtype) if tensor.is_floating_point() else tensor)
            for name, tensor in self.weights.outside_base()
        }

    def send(self, policy: Fingerprint) -> None:
        self._wake("weights")
        if self.lora_sync == "adapter":
            self._push_adapter()
        else:
            self._send_weights(self.changed_groups(policy))
            self.sync_metrics = self.drift.metrics()
            self.forget_noise()
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()  # which holds features of images
        self.stale_cache = _cached_blocks(self.llm) > 0

    def _send_weights(self, groups: set[str] | None) -> None:
        """
        Sends the weights of some [`changed_groups`], or all: [`in_place`], if vLLM holds them in the layout in which
        they are sent, or else, and the first time, through vLLM's own reload.
        """
        from . import in_place, worker

        if groups is not None:
            self.lay_noise(RolloutNoise())  # the norms that hold it may not be sent
        if self.destinations:
            in_place.write(self.destinations, self.stream(groups, whole=True), groups)
            return
        self.llm.collective_rpc(worker.reload, kwargs={"stream": self.stream(groups), "is_whole": groups is None})
        if self.destinations is None:
            # The sync's metrics are those of the first stream
            given = {"stream": self.stream(measured=False, whole=True), "names": self.weights.parameters()}
            (self.destinations,) = self.llm.apply_model(partial(in_place.destinations, **given))

    def _push_adapter(self):
        """Writes the policy's A and B into the engine."""
        from .adapter import write_adapter

        self.streaming = "the adapter"
        tensors = self.weights.adapter()
        self.llm.apply_model(partial(write_adapter, tensors=tensors))
        self.pushed = tensors

    @torch.no_grad()
    def update_since_sync(self) -> float:
        if self.lora_sync == "merge":
            return super().update_since_sync()
        now = self.weights.adapter()
        update = torch.stack([(now[name] - sent).norm() for name, sent in self.pushed.items()]).norm()
        return (update / torch.stack([sent.norm() for sent in self.pushed.values()]).norm()).item()

    def differing_weight(self) -> str | None:
        from . import worker

        def compare(model: nn.Module) -> str | None:
            config, format = self.llm.llm_engine.vllm_config, PRECISIONS[self.precision].format
            comparison = worker.WeightComparison(model, config, format, self.quantizers)
            comparison.add(self.unquantized())
            return comparison.differing()

        return self.llm.apply_model(compare)[0]

    # Noise

    def read_norms(self) -> dict[str, Tensor]:
        from . import worker

        (names,) = self.llm.apply_model(worker.parameter_names)
        norms = noised_norms(self.weights.model_type, names)
        return self.llm.apply_model(partial(worker.parameters, names=norms))[0]

    def write_norms(self, values: dict[str, Tensor]) -> None:
        from . import worker

        self.llm.apply_model(partial(worker.write_parameters, values=values))
        self.llm.reset_prefix_cache()

    # Sleep

    def _wake(self, tag: str):
        """Wakes vLLM's memory of this tag, if it sleeps."""
        if tag in self._asleep:
            empty_cache()  # vLLM takes its memory back outside torch's allocator
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)
            with torch.inference_mode():  # in which vLLM made these tensors
                for tensor, copy in self.discarded if tag == "weights" else ():
                    tensor.copy_(copy)

    def rest(self) -> None:
        if self.sleep_level:
            self.llm.sleep(level=self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            self.is_current = self.is_current and self.sleep_level == 1

    def ensure_ready(self) -> bool:
        self.require_alive()
        woken = bool(self._asleep)
        self._wake("weights")
        super().ensure_ready()
        self._wake("kv_cache")
        return woken

    # Sample

    def requests(self) -> int:
        """Also counts requests to vLLM itself (`llm.generate`, `llm.chat`)."""
        return super().requests() + self.llm.request_counter.counter

    def sampling(self) -> AbstractContextManager[dict]:
        """Context of each generation in vLLM. It yields further fields of vLLM's `SamplingParams`."""
        return sampling_lean(self.llm, self.settings)

    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        """
        Samples one completion for each request, or until `enough` says so; see [`~rollout.engine.Engine`]. The ranks of
        one engine, which must call it together, sample the requests of all of them, and each returns its own.

        Raises:
            `RuntimeError`: vLLM has dropped a completion before its end.
        """
        everyones, start = self._gathered(requests)
        if self._group is not None and is_peft_model(self.model):
            # On some hardware vLLM's first collective hangs while NCCL still cleans up after that of small gradients
            torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        with nothing_left_behind(self.llm), counting_drafts(self.llm, self.drafts), self.sampling() as further:
            options = self.tempering() | {"n": 1, "max_tokens": self.settings.max_completion_length, "logprobs": 0}
            options |= self.further_options() | further
            if self.returns_kept and options["top_k"] <= 0:
                options["top_k"] = self.vocabulary  # as many as there are
            asked = partial(parameters, options, self.settings.structured_outputs_regex)
            samples = sampled(self.llm, everyones, asked, enough, self.image_token, self.vocabulary)
        own = slice(start, start + len(requests))
        others = (each and each[own] for each in (samples.ended, samples.routing, samples.kept))
        return Samples(samples.token_ids[own], samples.logps[own], *others)

    @property
    def bound(self) -> int | None:
        """The `top_k` of a check, as in [`~sampling.checking`]; `None` if vLLM takes greedy requests."""
        return self.vocabulary if self.returns_kept else None

    def _gathered(self, requests: list[Request]) -> tuple[list[Request], int]:
        """Returns the requests of all ranks that form this engine, and the place of this rank's first among them."""
        if self._group is None:
            return requests, 0
        by_rank = [None] * self.vllm.tensor_parallel_size
        torch.distributed.all_gather_object(by_rank, requests, group=self._group)
        before = by_rank[: torch.distributed.get_rank(group=self._group)]
        return [request for rows in by_rank for request in rows], sum(map(len, before))

    def logps(
        self, prompts: list[list[int]], new_tokens: int, images: list[list] | None = None
    ) -> tuple[list[list[int]], list[Tensor]]:
        return greedy_logps(self.llm, requests_for(prompts, images), new_tokens, self.bound, self.image_token)

    def read_caches(self) -> list[dict[int, KVCache]]:
        from . import worker

        return self.llm.apply_model(worker.kv_caches)

    def limits(self) -> tuple[int, int]:
        config = self.llm.llm_engine.vllm_config
        return config.cache_config.block_size, config.model_config.max_model_len


def _fingerprint(*tensors: Tensor) -> Hashable:
    """Returns the [`~rollout.fingerprint.fingerprint`] of some tensors."""
    return fingerprint(nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors]))


def _cached_blocks(llm) -> int:
    """Returns the number of blocks of keys and values that the prefix cache would reuse."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    return len(manager.block_pool.cached_block_hash_to_block)
