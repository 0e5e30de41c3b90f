"""What the two vLLM engines share, the one in the trainer's process and the one behind a server.

A sync streams the policy into the engine. Before samples are drawn the engine is compared with the policy, every so
many syncs, and the noise is laid on its norms. Where and how is left to the engines.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from ..formats.checkpoint import checkpoint_stream, quantizes
from ..noise import noised_norms, norm_noise
from .base import RolloutEngine, RolloutNoise
from .vllm_support import ONLINE, quantizers_on, unquantized_layers


class VLLMBase(RolloutEngine):
    """
    Base of the vLLM engines.

    Parameters:
        sync_check_steps (`int`, *optional*, defaults to `50`): Syncs from one self-check to the next; 0 for none.

    Attributes:
        stale_cache (`bool`): Whether the prefix cache outlived the last sync.
        last_check (`dict` or `None`): What the last whole self-check measured.
        product_errors (`dict[int, float]`): Relative errors of the device's INT8 products; see `vllm_worker`.
    """

    lora_sync = "merge"
    sleep_level = 0

    def __init__(self, *args, sync_check_steps: int = 50, **kwargs):
        self.sync_check_steps = sync_check_steps
        self.stale_cache = False
        self.last_check: dict | None = None
        self.product_errors: dict[int, float] = {}
        self._current = False  # whether the engine holds the weights of the last sync
        self._syncs_to_check = 1  # the first is checked
        self._streaming = "the first tensor"
        self._failure: str | None = None
        self._non_finite: dict[str, Tensor] = {}
        self._clean_norms: dict[str, Tensor] = {}
        self._applied_noise = RolloutNoise()
        super().__init__(*args, **kwargs)

    # For the engines to fill in

    def _send(self) -> None:
        """Brings the policy's weights into the engine."""
        raise NotImplementedError

    def _read_norms(self) -> dict[str, Tensor]:
        """Clean weights of the norms that are noised, by the engine's names, in the order of the layers."""
        raise NotImplementedError

    def _write_norms(self, values: dict[str, Tensor]) -> None:
        """Writes norm weights and forgets what was computed with those before."""
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

    # The policy

    @property
    def policy(self) -> nn.Module:
        """The policy without PEFT's wrapper."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    @property
    def tokenizer(self):
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def on_cpu(self) -> bool:
        return self.accelerator.device.type == "cpu"

    def _plan_stream(self, prepared: bool) -> None:
        """Settles which layers travel quantized: none to an engine that quantizes what it gets."""
        self.ignore = unquantized_layers(self.policy)
        self.in_checkpoint_layout = prepared or self.precision not in ("bf16", *ONLINE)
        self.quantizers = quantizers_on(self.accelerator.device)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights under the names and in the layout that the engine loads. Collective."""
        weights = self._watched(self._iter_named_params())
        if not self.in_checkpoint_layout:
            return weights
        if self.on_cpu:
            return checkpoint_stream(weights, self.precision, self.ignore, **self.quantizers)
        unchecked = self.quantizers | {"quantizer": partial(self.quantizers["quantizer"], check=False)}
        return self._flagged(checkpoint_stream(weights, self.precision, self.ignore, **unchecked))

    def _flagged(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Notes on the GPU which scales tell of NaN or infinity, since to look at once would wait for every layer."""
        from ..kernels.quantize import shows_non_finite

        for name, tensor in stream:
            if name.endswith(".weight_scale"):
                self._non_finite[name.removesuffix("_scale")] = shows_non_finite(tensor, self.precision)
            yield name, tensor

    def _require_finite(self) -> None:
        flags, self._non_finite = self._non_finite, {}
        if flags and torch.stack(list(flags.values())).any():
            self._streaming = next(f"`{name}`" for name, flag in flags.items() if flag)
            raise ValueError("it holds NaN or infinity")

    def _watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Brings `weights` to the engine's device, and notes their names (for errors) and norms (for the metrics)."""
        for name, tensor in weights:
            self._streaming = f"`{name}`"
            tensor = tensor.to(self.accelerator.device)
            if self.drift.measures(name) and quantizes(name, tensor, self.ignore):
                rows = tensor[: self.drift.rows(tensor)]
                self.drift.add(name, tensor, rows.bfloat16() if self.precision == "bf16" else self._quantized(rows))
            yield name, tensor

    def _quantized(self, rows: Tensor) -> Tensor:
        return self.quantizers["quantizer"](rows, self.precision, check=self.on_cpu).dequantize()

    def update_since_sync(self) -> float:
        """How far the policy has moved from what was last sent to the engine, relative to its norm. Collective."""
        return self.drift.update_since_sync(self._iter_named_params()) or 0.0

    # Sync

    @torch.no_grad()
    def sync_weights(self):
        """
        Gives the engine the policy's current weights, without noise; fills `sync_metrics`.

        Raises:
            `RuntimeError`: if it fails, naming the tensor. vLLM cannot be used afterwards: its model is half loaded.
        """
        self._require_alive()
        self._streaming = "the first tensor"
        try:
            self._send()
            self._require_finite()
        except BaseException as error:
            self._failure = (
                f"The sync of the {self.precision} vLLM engine failed at {self._streaming}: {error}. The engine is "
                "half loaded and cannot be used any more; start the run again from its last checkpoint."
            )
            if isinstance(error, Exception):
                raise RuntimeError(self._failure) from error
            raise
        self._current = True
        self._syncs_to_check = max(0, self._syncs_to_check - 1)

    def _require_alive(self):
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _be_ready(self) -> bool:
        """Syncs an engine that never had the policy's weights, or lost them; whether it had to be woken for that."""
        self._require_alive()
        if not self._current:
            self.sync_weights()
        return False

    # Noise

    @torch.no_grad()
    def _lay_noise(self, noise: RolloutNoise):
        """
        Lays `noise` on the engine's norms in place, from their clean weights: it never accumulates (QeRL eq. 8), and
        with sigma 0 they come back bit for bit.
        """
        if noise == self._applied_noise or noise.sigma == self._applied_noise.sigma == 0:
            return
        self._clean_norms = self._clean_norms or self._read_norms()
        # The noise is keyed by the policy's names, which vLLM may map to others in the same order.
        keys = noised_norms(self._model_type, self._policy_names())
        self._write_norms(
            {
                name: norm_noise(clean, noise.sigma, noise.seed, noise.step, key)
                for key, (name, clean) in zip(keys, self._clean_norms.items(), strict=True)
            }
        )
        self._applied_noise = noise

    def _noise_is_gone(self) -> None:
        """After new norm weights came with a sync."""
        self._clean_norms, self._applied_noise = {}, RolloutNoise()

    @property
    def _model_type(self) -> str:
        return self.model.config.get_text_config().model_type

    def _policy_names(self) -> list[str]:
        prefixes = ["base_model.model.", "base_layer.", "_fsdp_wrapped_module."]
        return [self._fix_param_name_to_vllm(name, prefixes) for name, _ in self.model.named_parameters()]

    # Self-check

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

    def generate(self, prompts, images, num_generations, profiler=None):
        """See TRL's `VLLMGeneration.generate`."""
        woken = self._be_ready()
        if self.sync_check_steps and (self._syncs_to_check == 0 or woken):
            self.check_sync(quick=self._syncs_to_check > 0)
        self._lay_noise(self.noise)
        return super().generate(prompts, images, num_generations, profiler)
