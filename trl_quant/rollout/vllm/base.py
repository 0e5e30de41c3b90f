"""The common part of the two vLLM engines, the one in the trainer's process and the one behind a server.

A sync streams the policy into the engine. Before the engine samples, noise is added to its norms, and at intervals the
self-check compares it with the policy. TRL's own code starts vLLM and asks it for samples ([`TRLGeneration`]).
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
from ..engine import RolloutNoise, Samples
from ..stream import ties_embeddings
from ..trl_adapter import RolloutEngine, count_layers
from ..verify.kv_cache import UNQUANTIZED, KVCache
from .support import brings_cache_scales, quantizers_on


class VLLMBase(RolloutEngine):
    """
    Base of the vLLM engines. A subclass sets its own attributes and then calls [`start`].

    Parameters:
        sync_check_steps (`int`, *optional*, defaults to `50`): Syncs from one self-check to the next; 0 for none.

    Attributes:
        lora_sync (`str`): How an adapter reaches the engine, `"merge"` or `"adapter"`.
        sleep_level (`int`): vLLM's sleep level between generations; 0 if it stays awake.
        checkpoint_dtype (`torch.dtype` or `None`): Type of the weights that the engine starts on, if that is known.
        ignore (`list[str]`): Linear layers of the policy that are not quantized.
        travels_quantized (`bool`): Whether the engine takes codes and scales rather than BF16 weights.
        quantizers (`dict`): The functions that quantize on the engine's device; see [`~support.quantizers_on`].
        streaming (`str`): The tensor that a sync is sending, for errors.
        stale_cache (`bool`): Whether the prefix cache outlived the last sync.
        last_check (`dict` or `None`): What the last whole self-check measured.
        product_errors (`dict[int, float]`): Relative errors of the device's INT8 products; see [`~worker.int8_errors`].
        caches (`dict[int, KVCache]`): The quantized KV caches, by layer, with the scales of a fresh engine.
        syncs_to_check (`int`): Syncs until the next self-check.
    """

    def __init__(self, *args, sync_check_steps: int = 50, **kwargs):
        super().__init__(*args, **kwargs)
        self.sync_check_steps = sync_check_steps
        self.lora_sync = "merge"
        self.sleep_level = 0
        self.checkpoint_dtype: torch.dtype | None = None
        self.ignore: list[str] = []
        self.travels_quantized = False
        self.quantizers: dict = {}
        self.streaming = "the first tensor"
        self.stale_cache = False
        self.last_check: dict | None = None
        self.product_errors: dict[int, float] = {}
        self.caches: dict[int, KVCache] = {}
        self.syncs_to_check = 1  # the first sync is checked
        self._failure: str | None = None
        self._non_finite: dict[str, Tensor] = {}
        self._built_for: set = set()

    def start(self) -> None:
        """Starts vLLM, and settles what the engine was started for."""
        self.start_vllm()
        if not self.generation_kwargs.get("ignore_eos"):  # vLLM knows only the stop tokens of its own checkpoint
            given = self.generation_kwargs.get("stop_token_ids") or []
            self.generation_kwargs = self.generation_kwargs | {"stop_token_ids": [*given, *self.eos_token_ids]}
        self.drift.quantizer = self.quantizers["quantizer"]
        self._built_for = self._kind_of_model()

    # What a vLLM engine implements, beside `read_norms` and `write_norms`

    def start_vllm(self) -> None:
        """Starts vLLM, or connects to its server."""
        raise NotImplementedError

    def send(self) -> None:
        """Brings the policy's weights into the engine."""
        raise NotImplementedError

    def logps(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[Tensor]]:
        """
        Lets the engine continue the prompts greedily, with its prefix cache, and score them without it.

        Returns:
            `(list[list[int]], list[torch.Tensor])`: the prompts with `new_tokens` more tokens each, and the
            log-probability of each token but the first, shape (length - 1,), in nats.
        """
        raise NotImplementedError

    def limits(self) -> tuple[int, int]:
        """`(tokens in a block of the prefix cache, tokens in the longest sequence)`."""
        raise NotImplementedError

    def read_caches(self) -> list[dict[int, KVCache]]:
        """The quantized KV caches, by layer, as each worker that this process can ask holds them now."""
        raise NotImplementedError

    def expect_caches(self, format: str, config: PreTrainedConfig) -> None:
        """Records the KV caches, in vLLM's `format`, of an engine that just started on a checkpoint with `config`."""
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
        """Decides which layers travel quantized. An engine that quantizes by itself takes BF16 weights."""
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
        """What a vLLM model is built for: the names of its parameters and the size of its vocabulary."""
        vocabulary = f"a vocabulary of {self.weights.base_model.config.get_text_config().vocab_size}"
        if self.weights.sharding.fsdp_version == 1:  # FSDP1 joins parameters
            return {vocabulary}
        return {vocabulary, *dict(self.weights.outside_base())}

    def _require_same_model(self) -> None:
        """Raises `ValueError` if the policy has become another model."""
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
        """The weights in the engine's layout. A policy that trains in its codes and scales gives those."""
        format = PRECISIONS[self.precision].format
        if not self.weights.unified(self.precision):
            yield from checkpoint_stream(weights, format, self.ignore, **quantizers)
            return
        for name, tensor in self.quantized_as_trained(weights):
            if isinstance(tensor, QuantizedTensor):
                yield from checkpoint_tensors(name, tensor).items()
            else:
                yield from checkpoint_stream([(name, tensor)], format, self.ignore, **quantizers)

    def _flagged(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Records on the GPU which scales show NaN or infinity; reading the result here would wait for each layer."""
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
        """Moves `weights` to the engine's device and records their names, for errors, and norms, for the metrics."""
        for name, tensor in weights:
            self.streaming = f"`{name}`"
            tensor = tensor.to(self.accelerator.device)
            if self.drift.measures(name):
                self.drift.add(name, tensor)
            yield name, tensor

    def update_since_sync(self) -> float:
        """How far the policy has moved since the last sync, relative to its norm. Collective."""
        return self.drift.since_sync(self._iter_named_params()).get("normalized_update", 0.0)

    def unquantized(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights without those of the linear layers that the engine quantizes. Collective."""
        layers = {f"{layer.name}.weight" for layer in dense_linears(self.weights.base_model).values()}
        with exchanged(self.weights, unread=layers):
            for name, tensor in self._iter_named_params():
                if name not in layers:
                    yield name, tensor

    def held_otherwise(self) -> str | None:
        """
        The name of the first of the [`unquantized`] weights that differs between engine and policy; `None` if all are
        equal or this process cannot read them. Collective.
        """
        return None

    # Sync

    @torch.no_grad()
    def sync(self) -> None:
        """
        Gives the engine the policy's current weights, without noise; fills `sync_metrics`.

        Raises:
            `ValueError`: if the policy has become another model.
            `RuntimeError`: if the sync fails, with the tensor's name. Then vLLM's model is half loaded and cannot be
                used any more.
        """
        self.require_alive()
        self._require_same_model()
        self.weights.forget_quantized_weights()
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
        """Raises `RuntimeError` if a sync has failed."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def ensure_ready(self) -> bool:
        self.require_alive()
        return super().ensure_ready()

    # Self-check

    def check_sync(self, quick: bool = False) -> dict[str, float]:
        """Compares engine and policy, both without noise: [`~rollout.verify.self_check.self_check`]."""
        from ..verify.self_check import self_check

        self.ensure_ready()
        self.lay_noise(RolloutNoise())
        metrics = self_check(self, quick)
        if not quick:
            self.syncs_to_check = self.sync_check_steps
        self.sync_metrics = {**self.sync_metrics, **metrics}
        return metrics

    # Sample

    def prepare(self) -> None:
        woken = self.ensure_ready()
        if self.sync_check_steps and (self.syncs_to_check == 0 or woken):
            self.check_sync(quick=self.syncs_to_check > 0)
        self.lay_noise(self.noise)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """Samples one turn of a generation with TRL's own code; see TRL's `VLLMGeneration.generate`."""
        with self.generation(), self.sampling():
            return self.trl.generate(prompts, images, num_generations, profiler)

    def sample(self, prompts: list[list[int]], images: list | None = None) -> Samples:
        _, token_ids, logprobs, _ = self.generate(prompts, images, 1)
        return Samples(token_ids, [[drawn for drawn, *_ in row] for row in logprobs])

    def sampling(self) -> AbstractContextManager:
        """Context in which TRL asks vLLM for samples. A server gets TRL's requests as they are."""
        return nullcontext()
