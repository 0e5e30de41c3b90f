"""The common part of the two vLLM engines, the one in the trainer's process and the one behind a server.

A sync streams the policy into the engine. Before the engine samples, noise is added to its norms, and at intervals the
self-check compares it with the policy.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig, ProcessorMixin

from ...formats import QuantizedTensor
from ...models.families import EXPERT_PARTS, ROUTERS, number_of_experts
from ...models.linears import fused_with, is_mixtures, sampled_linears, sent_with
from ...precisions import PRECISIONS
from ...run_spec import EngineSpec
from ...storage.experts import NamesOnDisk
from ...storage.layout import checkpoint_stream, checkpoint_tensors, quantizers_on
from ...storage.quantization import brings_cache_scales
from ..base import RolloutEngine, count_layers
from ..engine import RolloutNoise
from ..fingerprint import Fingerprint, fingerprint
from ..tensors import ties_embeddings
from ..verify.kv_cache import UNQUANTIZED, KVCache
from .attention import refusal_of_images
from .speculation import Drafts
from .support import check_experts_here, compute_as_vllm


WEIGHT_SCALES = ("weight_scale", *(f"{leaf}_scale" for leaf in EXPERT_PARTS))  # ends of the names of codes' scales


class VLLMBase(RolloutEngine):
    """
    Base of the vLLM engines. A subclass sets its own attributes and then calls [`start`].

    Parameters:
        sync_check_steps (`int`, *optional*, defaults to `50`):
            Number of syncs between two self-checks; 0 for no self-checks.

    Attributes:
        lora_sync (`str`): How an adapter reaches the engine, `"merge"` or `"adapter"`.
        sleep_level (`int`): vLLM's sleep level between generations; 0 if it stays awake.
        checkpoint_dtype (`torch.dtype` or `None`): Type of the weights that the engine starts on, if it is known.
        ignore (`list[str]`): Names of the policy's linear layers that are not quantized, in memory and on disk.
        has_experts (`bool`): Whether the policy is a mixture of experts.
        travels_quantized (`bool`): Whether a sync sends codes and scales instead of BF16 weights.
        names_on_disk ([`~storage.experts.NamesOnDisk`]): Names the policy's tensors as a checkpoint does.
        quantizers (`dict`): The functions that quantize on the engine's device; see [`~storage.layout.quantizers_on`].
        fused (`dict[str, tuple[str, ...]]`):
            Name of a linear layer -> those that the engine computes as one matrix with it, as the engine says; empty
            for a server, where the table of families says it.
        streaming (`str`): The tensor that a sync is sending, for error messages.
        stale_cache (`bool`): Whether the prefix cache still holds blocks from before the last sync.
        last_check (`dict` or `None`): Results of the last full self-check.
        product_errors (`dict[int, float]`): Relative errors of the INT8 products; see [`~kernel_checks.int8_errors`].
        caches (`dict[int, KVCache]`): The quantized KV caches, by layer, with the scales of a fresh engine.
        syncs_to_check (`int`): Number of syncs until the next self-check.
        drafts ([`~speculation.Drafts`] or `None`):
            Counts of speculative decoding since the last [`take_metrics`]; `None` without it.
        has_checked_drafts (`bool`): Whether samples of speculative decoding were found to be right.
    """

    def __init__(self, *args, sync_check_steps: int = 50, **kwargs):
        super().__init__(*args, **kwargs)
        self.sync_check_steps = sync_check_steps
        self.lora_sync = EngineSpec.lora_sync
        self.sleep_level = EngineSpec.sleep_level
        self.checkpoint_dtype: torch.dtype | None = None
        self.ignore: list[str] = []
        self.has_experts = number_of_experts(self.weights.base_model.config.to_dict()) > 1
        self.travels_quantized = False
        self.quantizers: dict = {}
        self.fused: dict[str, tuple[str, ...]] = {}
        self.names_on_disk = NamesOnDisk(self.weights.base_model)
        self.streaming = "the first tensor"
        self.stale_cache = False
        self.last_check: dict | None = None
        self.product_errors: dict[int, float] = {}
        self.caches: dict[int, KVCache] = {}
        self.syncs_to_check = 1  # the first sync is checked
        self.drafts: Drafts | None = None
        self.has_checked_drafts = False
        self._failure: str | None = None
        self._non_finite: dict[str, Tensor] = {}
        self._started_model: set = set()  # `_model_traits` when the engine started

    def start(self) -> None:
        """Starts vLLM, or connects to its server, and records the model that the engine was started for."""
        self.start_vllm()
        self.accelerator.wait_for_everyone()  # vLLM takes longer on some ranks, and DeepSpeed would not wait
        if not self.on_cpu and self.weights.multiplies_in(self.precision):
            compute_as_vllm(self.precision, self.accelerator.device)
        self.drift.quantizer = self.quantizers["quantizer"]
        self.refuses_images = refusal_of_images(self.weights.base_model.config, self.drafts is not None)
        self._started_model = self._model_traits()

    def further_options(self) -> dict:
        """
        Returns the `generation_kwargs`, with the policy's end tokens, of which vLLM knows only its checkpoint's, and
        without tokens of images.
        """
        given = self.settings.generation_kwargs
        if isinstance(self.processing_class, ProcessorMixin) and self.image_token is not None and self.drafts is None:
            # No image would belong to an image token that is sampled
            given = given | {"logit_bias": {self.image_token: -100.0} | (given.get("logit_bias") or {})}
        if given.get("ignore_eos"):
            return given
        return given | {"stop_token_ids": [*(given.get("stop_token_ids") or []), *self.eos_token_ids]}

    def tempering(self) -> dict:
        """Returns the settings that change the distribution of tokens, by vLLM's names."""
        settings = self.settings
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p or 0.0,
            "repetition_penalty": settings.repetition_penalty,
        }

    # Methods that a vLLM engine implements, in addition to `read_norms` and `write_norms`

    def start_vllm(self) -> None:
        """Starts vLLM, or connects to its server."""
        raise NotImplementedError

    def send(self, policy: Fingerprint) -> None:
        """Sends the policy's weights, which have this fingerprint, to the engine."""
        raise NotImplementedError

    def logps(
        self, prompts: list[list[int]], new_tokens: int, images: list[list] | None = None
    ) -> tuple[list[list[int]], list[Tensor]]:
        """
        Lets the engine continue the prompts greedily, with its prefix cache, and score the prompts without it.

        Args:
            prompts (`list[list[int]]`): Token ids.
            new_tokens (`int`): Number of tokens to continue with.
            images (`list[list]`, *optional*): The images of each prompt. A server does not score such prompts.

        Returns:
            `(list[list[int]], list[torch.Tensor])`: The prompts with `new_tokens` more tokens each; for each sequence
            the log-probabilities, in nats, of all tokens but the first, shape (length - 1,), or of the new ones.
        """
        raise NotImplementedError

    def limits(self) -> tuple[int, int]:
        """Returns the number of tokens in a block of the prefix cache, and in the longest sequence."""
        raise NotImplementedError

    @property
    def context(self) -> int:
        return self.limits()[1]

    def read_caches(self) -> list[dict[int, KVCache]]:
        """Returns the current quantized KV caches, by layer, of each worker that this process can ask."""
        raise NotImplementedError

    def expect_caches(self, format: str, config: PreTrainedConfig) -> None:
        """
        Records the KV caches of an engine that has just started, with the scales of a fresh engine.

        Args:
            format (`str`): vLLM's name of the caches' type.
            config ([`~transformers.PreTrainedConfig`]): The config of the checkpoint that the engine started on.
        """
        if format in UNQUANTIZED:
            return
        self.caches = self.read_caches()[0]
        if not brings_cache_scales(config):
            for index, cache in self.caches.items():
                self.caches[index] = replace(cache, scales=dict.fromkeys(cache.scales, 1.0))

    # The stream of the policy's weights

    @property
    def on_cpu(self) -> bool:
        """Whether the policy is on a CPU."""
        return self.accelerator.device.type == "cpu"

    def own_base_bytes(self) -> int:
        """Returns the bytes of the policy's base if it is frozen in the engine's precision, else 0."""
        layers = [layer for _, layer in self.weights.frozen() if layer.precision == self.precision]
        return sum(tensor.nbytes for layer in layers for tensor in layer.parameters())

    def plan_stream(self, prepared: bool) -> None:
        """
        Decides whether a sync sends codes and scales, or BF16 weights that the engine quantizes itself.

        Args:
            prepared (`bool`): Whether the engine starts on a quantized checkpoint.

        Raises:
            `ValueError`: The policy and its config disagree on whether the head is tied to the embeddings.
        """
        policy = self.weights.base_model
        count_layers(policy, self.precision)
        whole, text = policy.config, policy.config.get_text_config()
        ties = (text if hasattr(text, "tie_word_embeddings") else whole).tie_word_embeddings  # Qwen3-VL's text has none
        if ties and not ties_embeddings(policy):
            raise ValueError(
                "The policy's head has a weight of its own (`modules_to_save`, LoRA on the embeddings or the head, or "
                "it was untied in memory), but its config says `tie_word_embeddings`, and vLLM would sample with one "
                "weight for both. Train neither of the two by itself, save the untied model with "
                "`tie_word_embeddings=False` and start from that, or sample with `use_vllm=False`."
            )
        if not ties and ties_embeddings(policy):
            configs = {"config": whole} if text is whole else {"config": whole, "config.text_config": text}
            untied = [name for name, config in configs.items() if not getattr(config, "tie_word_embeddings", True)]
            fields = " and ".join(f"`{name}.tie_word_embeddings=True`" for name in untied)
            raise ValueError(
                "The policy's head has the weight of its embeddings, but its config says `tie_word_embeddings=False`, "
                f"and vLLM would expect a weight of the head. Set {fields}, save the model and start from that, or "
                "sample with `use_vllm=False`."
            )
        self.ignore = self.names_on_disk.kept()
        self.travels_quantized = prepared or PRECISIONS[self.precision].travels_quantized
        if self.has_experts:
            check_experts_here(self.precision)
            # As codes, which the self-check can compare; vLLM would also quantize routers
            self.ignore.append(ROUTERS)
            self.travels_quantized = PRECISIONS[self.precision].format is not None
        self.quantizers = quantizers_on(self.accelerator.device)

    def _model_traits(self) -> set:
        """Returns the traits of the policy that vLLM's model is built for: parameter names and vocabulary size."""
        vocabulary = f"a vocabulary of {self.weights.base_model.config.get_text_config().vocab_size}"
        return {vocabulary, *dict(self.weights.outside_base())}

    def _require_same_model(self) -> None:
        """Raises `ValueError` if the policy has become another model."""
        before, now = self._started_model, self._model_traits()
        if now != before:
            gained = ", ".join(sorted(now - before)[:3]) or "nothing"
            lost = ", ".join(sorted(before - now)[:3]) or "nothing"
            raise ValueError(
                f"The policy is another model than vLLM was started for: it gained {gained}, and lost {lost}. Undo the "
                "change (tying or untying the head, resizing the vocabulary, torch's `parametrize` or `prune`), save "
                "the changed model and start from that, or sample with `use_vllm=False`."
            )

    def changed_groups(self, policy: Fingerprint) -> set[str] | None:
        """
        Returns the groups of tensors ([`~models.linears.sent_with`]) of which the engine may not hold the policy's
        values: those that have changed since the last sync on some rank, whatever changed them. Groups with buffers,
        which fingerprints leave out, and groups that the drift is measured by are among them. `None` stands for all.
        All ranks must call it, with the current fingerprint of the policy.
        """
        names = self.weights.parameters()
        groups = list(dict.fromkeys(map(sent_with, names)))
        changed = self.weights.changed_groups(self.held, policy) if self.is_current else None
        if changed is None or not changed <= set(groups):
            changed = set(groups)
        changed |= {sent_with(name) for name in names if self.drift.measures(name) or self.names_on_disk.buffers(name)}
        flags = torch.tensor([float(group in changed) for group in groups], device=self.accelerator.device)
        flags = self.accelerator.reduce(flags, "sum").tolist()
        found = {group for group, flag in zip(groups, flags, strict=True) if flag}
        return None if len(found) == len(groups) else found

    def stream(
        self, groups: Collection[str] | None = None, measured: bool = True, whole: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """
        Streams the policy's weights in the layout that the engine loads. All ranks must iterate over it.

        Args:
            groups (`Collection[str]`, *optional*): Those of [`changed_groups`]; by default all.
            measured (`bool`, *optional*, defaults to `True`): Whether the drift is measured on the way.
            whole (`bool`, *optional*, defaults to `False`):
                Whether the experts of a layer come in one tensor, under the policy's name, and not one by one under
                their names on disk.
        """
        placeholders = self.quantized_in_training(measured) if self.travels_quantized else ()
        weights = self._watched(self.policy_stream(placeholders, groups), measured)
        if self.travels_quantized and self.on_cpu:
            weights = self._quantized(weights, **self.quantizers)
        elif self.travels_quantized:
            unchecked = self.quantizers | {"quantizer": partial(self.quantizers["quantizer"], check=False)}
            weights = self._flagged(self._quantized(weights, **unchecked))
        return self.names_on_disk.with_buffers(weights) if whole else self.names_on_disk.stream(weights)

    def _quantized(self, weights: Iterable[tuple[str, Tensor]], **quantizers) -> Iterator[tuple[str, Tensor]]:
        """Streams weights in the engine's quantized layout. A policy that trains in it provides codes and scales."""
        format = PRECISIONS[self.precision].format
        if not self.weights.unified(self.precision):
            yield from checkpoint_stream(weights, format, self.ignore, siblings=self.fused_in_engine, **quantizers)
            return
        for name, tensor in self.quantized_as_trained(weights):
            if isinstance(tensor, QuantizedTensor):
                yield from checkpoint_tensors(name, tensor).items()
            else:
                yield from checkpoint_stream([(name, tensor)], format, self.ignore, **quantizers)

    def fused_in_engine(self, name: str) -> tuple[str, ...]:
        """Returns the names of the layers that the engine computes as one matrix with the policy's layer `name`."""
        return self.fused.get(name) or fused_with(name)

    def _flagged(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """
        Records, on the GPU, which scales reveal NaN or infinity. [`_require_finite`] reads the records after the sync,
        because reading them here would wait for the GPU at each layer.
        """
        from ...kernels.quantize import shows_non_finite

        format = PRECISIONS[self.precision].format
        for name, tensor in stream:
            if name.endswith(WEIGHT_SCALES):
                self._non_finite[name.removesuffix("_scale")] = shows_non_finite(tensor, format)
            yield name, tensor

    def _require_finite(self) -> None:
        flags, self._non_finite = self._non_finite, {}
        if flags and torch.stack(list(flags.values())).any():
            self.streaming = next(f"`{name}`" for name, flag in flags.items() if flag)
            raise ValueError("it holds NaN or infinity")

    def _watched(self, weights: Iterable[tuple[str, Tensor]], measured: bool) -> Iterator[tuple[str, Tensor]]:
        """Moves `weights` to the engine's device, records the current name for errors, and measures the weights."""
        for name, tensor in weights:
            self.streaming = f"`{name}`"
            tensor = tensor.to(self.accelerator.device)
            if measured and self.drift.measures(name):
                self.drift.add(name, tensor)
            yield name, tensor

    def update_since_sync(self) -> float:
        """
        Returns the norm of the policy's update since the last sync, relative to the policy's norm. All ranks must call
        it.
        """
        return self.drift.since_sync(self.policy_stream()).get("normalized_update", 0.0)

    def unquantized(self) -> Iterator[tuple[str, Tensor]]:
        """
        Streams the policy's weights, except those of the linear layers that the engine quantizes. Routers and experts
        are among them. All ranks must iterate over it.
        """
        found = sampled_linears(self.weights.base_model).values()
        layers = {layer.weight for layer in found if not layer.holds_experts}
        for name, tensor in self.names_on_disk.with_buffers(self.policy_stream(layers)):
            if name not in layers:
                yield name if is_mixtures(name) else self.names_on_disk.of(name), tensor

    def differing_weight(self) -> str | None:
        """
        Returns the name of the first of the [`unquantized`] weights that differs between engine and policy; `None` if
        all are equal, or if another process asks a server. All ranks must call it.
        """
        raise NotImplementedError

    # Sync

    @torch.no_grad()
    def sync(self) -> None:
        """
        Sends the policy's current weights to the engine, without noise, and sets `sync_metrics`.

        Raises:
            `ValueError`: The policy has become another model.
            `RuntimeError`: The sync failed; the message names the tensor. vLLM's model may then be half loaded, and the
                engine can no longer be used.
        """
        self.require_alive()
        self._require_same_model()
        self.weights.forget_quantized_weights()
        self.streaming = "the first tensor"
        policy = fingerprint(self.weights.model)
        try:
            self.send(policy)
            self._require_finite()
        except BaseException as error:
            cause = str(error).rstrip(".")
            self._failure = (
                f"The sync of the {self.precision} vLLM engine failed at {self.streaming}: {cause}. The engine may "
                "be half loaded and cannot be used any more; start the run again from its last checkpoint."
            )
            if isinstance(error, Exception):
                raise RuntimeError(self._failure) from error
            raise
        # Under ZeRO-3, reading parts of the policy that are whole divides them, and gives it another fingerprint
        self.mark_current(None if self.weights.is_sharded else policy)
        self.syncs_to_check = max(0, self.syncs_to_check - 1)

    def require_alive(self) -> None:
        """Raises `RuntimeError` if a sync has failed."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def ensure_ready(self) -> bool:
        self.require_alive()
        return super().ensure_ready()

    # Self-check

    def check_sync(self, quick: bool = False) -> dict[str, float]:
        """
        Compares engine and policy without noise; see [`~rollout.verify.self_check.self_check`]. A check that is not
        `quick` also compares samples, where vLLM speculates; see [`~rollout.verify.speculation.check_speculation`].
        After a check that fails, the next sync sends all weights. The run's random states are as before.
        """
        from ..verify.self_check import self_check
        from ..verify.speculation import check_speculation, random_states_kept

        self.ensure_ready()
        self.lay_noise(RolloutNoise())
        with random_states_kept(self.accelerator.device):
            try:
                metrics = self_check(self, quick)
            except Exception:
                self.is_current = False
                raise
            if self.drafts is not None and not quick:
                metrics |= check_speculation(self)
                self.has_checked_drafts = True
        if not quick:
            self.syncs_to_check = self.sync_check_steps
            self.mark_checked()
        self.sync_metrics = {**self.sync_metrics, **metrics}
        return metrics

    # Sample

    def prepare(self) -> None:
        woken = self.ensure_ready()
        if self.sync_check_steps:
            is_due = self.syncs_to_check == 0 or self.function_changed()
            if is_due or woken:
                self.check_sync(quick=not is_due)
        elif self.needs_first_check or (self.drafts is not None and not self.has_checked_drafts):
            self.check_sync()  # it cannot be switched off
        self.lay_noise(self.noise)

    def take_metrics(self) -> dict[str, float]:
        taken = super().take_metrics()
        return taken if self.drafts is None else taken | self.drafts.take(self.accelerator)
