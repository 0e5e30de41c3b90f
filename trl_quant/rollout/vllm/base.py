"""What the two vLLM engines share, the one in the trainer's process and the one behind a server.

A sync streams the policy into the engine. Before samples are drawn the engine is compared with the policy, every so
many syncs, and the noise is laid on its norms. Where and how is left to the engines.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ...formats import QuantizedTensor
from ...models.linears import dense_linears, unquantized_linears
from ...precisions import PRECISIONS
from ...storage.layout import checkpoint_stream, checkpoint_tensors
from ...trl_seams import exchanged
from ..stream import ties_embeddings
from ..trl_adapter import RolloutEngine, RolloutNoise, count_layers
from ..verify.kv_cache import UNQUANTIZED, KVCache
from .support import brings_cache_scales, quantizers_on


class VLLMBase(RolloutEngine):
    """
    Base of the vLLM engines.

    Parameters:
        sync_check_steps (`int`, *optional*, defaults to `50`): Syncs from one self-check to the next; 0 for none.

    Attributes:
        ignore (`list[str]`): Linear layers of the policy that are not quantized.
        travels_quantized (`bool`): Whether the engine takes codes and scales, not BF16 weights.
        streaming (`str`): What a sync is sending, for errors.
        stale_cache (`bool`): Whether the prefix cache outlived the last sync.
        last_check (`dict` or `None`): What the last whole self-check measured.
        product_errors (`dict[int, float]`): Relative errors of the device's INT8 products; see [`~worker.int8_errors`].
        caches (`dict[int, KVCache]`): The KV caches that are quantized, by layer, with the scales of a fresh engine.
    """

    lora_sync = "merge"
    sleep_level = 0
    checkpoint_dtype: torch.dtype | None = None

    def __init__(self, *args, sync_check_steps: int = 50, **kwargs):
        self.sync_check_steps = sync_check_steps
        self.ignore: list[str] = []
        self.travels_quantized = False
        self.streaming = "the first tensor"
        self.stale_cache = False
        self.last_check: dict | None = None
        self.product_errors: dict[int, float] = {}
        self.caches: dict[int, KVCache] = {}
        self.syncs_to_check = 1  # the first is checked
        self._failure: str | None = None
        self._non_finite: dict[str, Tensor] = {}
        super().__init__(*args, **kwargs)
        if not self.generation_kwargs.get("ignore_eos"):  # vLLM knows those of its own checkpoint alone
            given = self.generation_kwargs.get("stop_token_ids") or []
            self.generation_kwargs = self.generation_kwargs | {"stop_token_ids": [*given, *self.eos_token_ids]}
        self.drift.quantizer = self.quantizers["quantizer"]
        self._built_for = self._kind_of_model()

    # For the engines to fill in, beside `read_norms` and `write_norms`

    def send(self) -> None:
        """Brings the policy's weights into the engine."""
        raise NotImplementedError

    def logps(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[Tensor]]:
        """
        Has the engine continue the prompts greedily, from its prefix cache where it has one, and score them, without.

        Returns:
            `(list[list[int]], list[torch.Tensor])`: the prompts with their `new_tokens` more, and the log-probability
            of each token but the first, shape (length - 1,), in nats.
        """
        raise NotImplementedError

    def limits(self) -> tuple[int, int]:
        """`(tokens in a block of the prefix cache, tokens in the longest sequence)`."""
        raise NotImplementedError

    def read_caches(self) -> list[dict[int, KVCache]]:
        """The KV caches that are quantized, by layer, as each worker that can be asked from here has them now."""
        raise NotImplementedError

    def expect_caches(self, format: str, config: PreTrainedConfig) -> None:
        """Notes the KV caches, in vLLM's `format`, of an engine that just started on a checkpoint with this config."""
        if format in UNQUANTIZED:
            return
        self.caches = self.read_caches()[0]
        if not brings_cache_scales(config):
            self.caches = {
                index: replace(cache, scales=dict.fromkeys(cache.scales, 1.0)) for index, cache in self.caches.items()
            }

    # The policy's weights on their way

    @property
    def on_cpu(self) -> bool:
        return self.accelerator.device.type == "cpu"

    def own_base_bytes(self) -> int:
        """Bytes of the policy's base where it is frozen in the engine's precision, else 0."""
        layers = [layer for _, layer in self.weights.frozen() if layer.precision == self.precision]
        return sum(tensor.nbytes for layer in layers for tensor in layer.parameters())

    def plan_stream(self, prepared: bool) -> None:
        """Settles which layers travel quantized: none to an engine that quantizes what it gets."""
        policy = self.weights.base_model
        count_layers(policy, self.precision)
        ties = policy.config.get_text_config().tie_word_embeddings
        if ties and not ties_embeddings(policy):
            raise ValueError(
                "The policy's head has a weight of its own (`modules_to_save`, LoRA on the embeddings or the head, or "
                "it was untied in memory), but its config says `tie_word_embeddings`, and vLLM would sample with one "
                "weight for both. Train neither of the two by itself, save the untied model with "
                "`tie_word_embeddings=False` and start from that, or sample with `use_vllm=False`."
            )
        if not ties and ties_embeddings(policy):
            raise ValueError(
                "The policy's head has the weight of its embeddings, but its config says `tie_word_embeddings=False`, "
                "and vLLM would wait for a weight of the head. Set `config.tie_word_embeddings=True`, save the model "
                "and start from that, or sample with `use_vllm=False`."
            )
        self.ignore = unquantized_linears(policy)
        self.travels_quantized = prepared or PRECISIONS[self.precision].travels_quantized
        self.quantizers = quantizers_on(self.accelerator.device)

    def _kind_of_model(self) -> set:
        """What a vLLM model is built for: names of parameters, and how many tokens there are."""
        vocabulary = f"a vocabulary of {self.weights.base_model.config.get_text_config().vocab_size}"
        if self.weights.sharding.fsdp_version == 1:  # which joins parameters
            return {vocabulary}
        return {vocabulary, *dict(self.weights.outside_base())}

    def _require_same_model(self) -> None:
        """Raises `ValueError` for a policy that became another model."""
        before, now = self._built_for, self._kind_of_model()
        if now != before:
            added, missing = (", ".join(sorted(names)[:3]) or "nothing" for names in (now - before, before - now))
            raise ValueError(
                f"vLLM was started for another model than the policy is now: it gained {added}, and lost {missing}. "
                "Undo what did that (a head that was tied or untied, a vocabulary that was resized, torch's "
                "`parametrize` or `prune`), save the model and start from that, or sample with `use_vllm=False`."
            )

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under the names and in the layout that the engine loads. Collective."""
        weights = self._watched(self._iter_named_params())
        if not self.travels_quantized:
            return weights
        if self.on_cpu:
            return self._quantized(weights, **self.quantizers)
        unchecked = self.quantizers | {"quantizer": partial(self.quantizers["quantizer"], check=False)}
        return self._flagged(self._quantized(weights, **unchecked))

    def _quantized(self, weights: Iterable[tuple[str, Tensor]], **quantizers) -> Iterator[tuple[str, Tensor]]:
        """The weights in the engine's layout: the codes and scales that the policy is trained in, where it is."""
        format = PRECISIONS[self.precision].format
        if not self.weights.unified(self.precision):
            yield from checkpoint_stream(weights, format, self.ignore, **quantizers)
            return
        for name, tensor in self.in_codes(weights):
            if isinstance(tensor, QuantizedTensor):
                yield from checkpoint_tensors(name, tensor).items()
            else:
                yield from checkpoint_stream([(name, tensor)], format, self.ignore, **quantizers)

    def _flagged(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Notes on the GPU which scales tell of NaN or infinity, since to look at once would wait for every layer."""
        from ...kernels.quantize import shows_non_finite

        format = PRECISIONS[self.precision].format
        for name, tensor in stream:
            if name.endswith(".weight_scale"):
                self._non_finite[name.removesuffix("_scale")] = shows_non_finite(tensor, format)
            yield name, tensor

    def _require_finite(self) -> None:
        flags, self._non_finite = self._non_finite, {}
        if flags and torch.stack(list(flags.values())).any():
            self.streaming = next(f"`{name}`" for name, flag in flags.items() if flag)
            raise ValueError("it holds NaN or infinity")

    def _watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Brings `weights` to the engine's device, and notes their names (for errors) and norms (for the metrics)."""
        for name, tensor in weights:
            self.streaming = f"`{name}`"
            tensor = tensor.to(self.accelerator.device)
            if self.drift.measures(name):
                self.drift.add(name, tensor)
            yield name, tensor

    def update_since_sync(self) -> float:
        """How far the policy has moved from what was last sent to the engine, relative to its norm. Collective."""
        return self.drift.since_sync(self._iter_named_params()).get("normalized_update", 0.0)

    def unquantized(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights but those of the linear layers that the engine quantizes. Collective."""
        layers = {f"{layer.name}.weight" for layer in dense_linears(self.weights.base_model).values()}
        with exchanged(self.weights, unread=layers):
            for name, tensor in self._iter_named_params():
                if name not in layers:
                    yield name, tensor

    def held_otherwise(self) -> str | None:
        """
        The first of the [`unquantized`] weights, by its name, that the engine does not hold as the policy does; `None`
        where all are equal, or cannot be read from here. Collective.
        """
        return None

    # Sync

    @torch.no_grad()
    def sync_weights(self):
        """
        Gives the engine the policy's current weights, without noise; fills `sync_metrics`.

        Raises:
            `ValueError`: for a policy that became another model.
            `RuntimeError`: if it fails, naming the tensor. vLLM cannot be used afterwards: its model is half loaded.
        """
        self.require_alive()
        self._require_same_model()
        self.weights.forget_codes()
        self.streaming = "the first tensor"
        try:
            self.send()
            self._require_finite()
        except BaseException as error:
            self._failure = (
                f"The sync of the {self.precision} vLLM engine failed at {self.streaming}: {error}. The engine is "
                "half loaded and cannot be used any more; start the run again from its last checkpoint."
            )
            if isinstance(error, Exception):
                raise RuntimeError(self._failure) from error
            raise
        self.mark_current()
        self.syncs_to_check = max(0, self.syncs_to_check - 1)

    def require_alive(self) -> None:
        """Raises `RuntimeError` after a sync that failed."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def ensure_ready(self) -> bool:
        self.require_alive()
        return super().ensure_ready()

    # Self-check

    def check_sync(self, quick: bool = False) -> dict[str, float]:
        """Compares engine and policy now, both without noise: [`~rollout.verify.self_check.self_check`]."""
        from ..verify.self_check import self_check

        self.ensure_ready()
        self.lay_noise(RolloutNoise())
        metrics = self_check(self, quick)
        if not quick:
            self.syncs_to_check = self.sync_check_steps
        self.sync_metrics = {**self.sync_metrics, **metrics}
        return metrics

    # Generate

    def prepare(self) -> None:
        woken = self.ensure_ready()
        if self.sync_check_steps and (self.syncs_to_check == 0 or woken):
            self.check_sync(quick=self.syncs_to_check > 0)
        self.lay_noise(self.noise)

    def generate(self, prompts, images, num_generations, profiler=None):
        """One turn of a generation; see TRL's `VLLMGeneration.generate`."""
        with self.generation(), self.sampling():
            return super().generate(prompts, images, num_generations, profiler)

    def sampling(self) -> AbstractContextManager:
        """Context in which TRL has the engine sample. A server is sent to in TRL's own words."""
        return nullcontext()
