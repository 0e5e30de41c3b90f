"""What every rollout engine of ours shares: TRL's generation interface, and the noise.

The engines are TRL's `VLLMGeneration` with another back end, so `GRPOTrainer` drives them as it drives vLLM. A sync
streams clean weights; the noise (AQN) is laid on the engine's norms just before it samples.

A generation is what one batch of prompts is answered with. It has one turn, or with tools, environments and a
`rollout_func` as many as those take, which may differ from rank to rank. Each turn is a call of `generate`. What all
ranks must do together stands before the first turn, and happens once:

    with engine.generation():       # the weights of the policy, the self-check, the noise
        engine.generate(...)        # the first turn
        engine.generate(...)        # further turns, of this rank alone
                                    # at the end the engine sleeps, where it is to sleep
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from ..formats import QuantizedTensor
from ..models.linears import dense_linears
from ..noise import noised_norms, norm_noise
from ..trl_seams import exchanged
from .drift import WeightDrift
from .fingerprint import fingerprint
from .stream import PolicyWeights, fault_of
from .tokenizer import check_tokenizer


@dataclass(frozen=True)
class RolloutNoise:
    """
    Adaptive quantization noise of one generation (QeRL eq. 7-8).

    Parameters:
        sigma (`float`): Standard deviation; 0 means the clean weights.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
        draw (`int`): Which of the step's generations it is, from 0.
    """

    sigma: float = 0.0
    seed: int = 0
    step: int = 0
    draw: int = 0


class RolloutEngine(VLLMGeneration):
    """
    Base of the rollout engines. It takes the arguments that TRL gives to its `VLLMGeneration`, and:

    Parameters:
        precision (`str`):
            Number format of the copy, a key of [`~precisions.PRECISIONS`].
        wide_norms (`bool`, *optional*, defaults to `False`):
            Whether the norms that are noised are held in FP32. A BF16 weight near 1 has a spacing of 0.0078, in which
            noise of 1e-3 disappears.
        uaq_scale (`float`, *optional*, defaults to `1.0`):
            UAQ's s. The noise on a norm that was scaled by s is s Z, so that Z / w, which acts (QeRL eq. 12), is what
            sigma says.

    Attributes:
        weights ([`~rollout.stream.PolicyWeights`]):
            The policy's weights as they are now.
        noise (`RolloutNoise`):
            Of the next generation, the same for all of its turns; set by the trainer.
        is_current (`bool`):
            Whether the engine holds the weights of the last sync.
        held (`Hashable`):
            The [`~rollout.fingerprint.fingerprint`] of the policy that the last sync gave it.
        effective_sigma (`float`):
            Standard deviation of the noise that the norms hold, (stored - clean) / s, over all channels.
        multimodal_fields (`dict`):
            What the processor made of the prompts' images (`pixel_values` and the like); set by the trainer as well.
        sync_metrics (`dict[str, float]`):
            What the last sync measured, see [`~rollout.drift.WeightDrift.metrics`]. Weights that the engine lost and is
            given again count as no sync.
    """

    def __init__(
        self,
        model,
        accelerator,
        processing_class,
        *args,
        precision: str,
        wide_norms: bool = False,
        uaq_scale: float = 1.0,
        **kwargs,
    ):
        self.precision = precision
        self.wide_norms, self.uaq_scale = wide_norms, uaq_scale
        self.weights = PolicyWeights(model, accelerator)
        self.noise = RolloutNoise()
        self.multimodal_fields: dict = {}
        self.sync_metrics: dict[str, float] = {}
        self.is_current = False
        self.held: Hashable = None
        self._is_generating = False
        self._turns = 0
        self.effective_sigma = 0.0
        self._laid = RolloutNoise()  # the noise that the norms carry
        self._clean_norms: dict[str, Tensor] = {}
        given = kwargs.pop("generation_kwargs", None) or {}
        kwargs["generation_kwargs"] = {name: value for name, value in given.items() if value is not None}  # not given
        if processing_class is not None:
            vocabulary = self.weights.base_model.config.get_text_config().vocab_size
            check_tokenizer(getattr(processing_class, "tokenizer", processing_class), vocabulary)
        if fault := next(filter(None, gather_object([fault_of(self.weights)])), None):
            raise ValueError(f"`rollout_precision`={precision!r} cannot sample from the policy: {fault}")
        super().__init__(model, accelerator, processing_class, *args, **kwargs)
        self.drift = WeightDrift(self.weights.trained(), precision)

    def _iter_named_params(self):
        """TRL's name for the stream of the policy's weights; FSDP1 is walked by TRL itself."""
        return super()._iter_named_params() if self.weights.sharding.fsdp_version == 1 else iter(self.weights)

    def in_codes(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """`weights` of the policy; those that it computes with in the engine's precision as codes and scales."""
        layers = {f"{name}.weight": layer for name, layer in self.weights.unified(self.precision).items()}
        unread = {name for name in layers if not self.drift.measures(name)}
        with exchanged(self.weights, unread=unread):
            for name, tensor in weights:
                yield name, self.weights.codes(layers[name]) if name in layers else tensor

    @property
    def tokenizer(self):
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def eos_token_ids(self) -> list[int]:
        """Every token that ends a completion: the tokenizer's, if it has one, and all that the model declares."""
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        return list(dict.fromkeys(token for token in (self.tokenizer.eos_token_id, *declared) if token is not None))

    # Checkpoints

    def state_dict(self) -> dict:
        """What a checkpoint must hold for a resumed run to log what an unbroken one logs. Collective."""
        return {"drift": self.drift.since_sync(self._iter_named_params()), "initial_weights": self.drift.initial}

    def load_state_dict(self, state: dict) -> None:
        """Takes what [`state_dict`] returned; the initial weights may be missing, and are then not known."""
        self.drift.resumed, self.drift.initial = state.get("drift", {}), state.get("initial_weights")

    # Generate

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        Context of one generation, whatever the number of its turns. Collective on entry: engine and policy agree then,
        and no turn has anything left to do with other ranks. A generation within another is a part of that one.
        """
        if self._is_generating:
            self._turns += 1
            yield
            return
        self.prepare()
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False
        self.rest()

    def requests(self) -> int | None:
        """How often it was asked to sample within generations; `None` where others may ask unseen."""
        return self._turns

    def prepare(self) -> None:
        """Makes the engine ready to sample: the policy's weights, with the noise of this generation. Collective."""
        self.ensure_ready()
        self.lay_noise(self.noise)

    def rest(self) -> None:
        """Called when the last turn of a generation is over."""

    def ensure_ready(self) -> bool:
        """Gives the weights to an engine that never had them, or lost them; whether it had to be woken for that."""
        if not self.is_current:
            metrics = self.sync_metrics
            self.sync_weights()
            self.sync_metrics = metrics  # of the sync that the step began with; this one moved nothing
        return False

    def is_stale(self) -> bool:
        """
        Whether the policy's weights changed since the last sync, for whatever reason: an optimizer step, averaged
        weights that an evaluation swaps in, `load_state_dict`, an adapter that was switched. Collective: true on all
        ranks if it is on one.

        Hooks, and numbers that a module computes with beside its parameters and buffers (a norm's epsilon), are no
        weights: engines have those of the config. vLLM makes buffers, such as rotary frequencies, from it as well. The
        self-check finds such a change where it moves log-probabilities by more than its bound.
        """
        changed = torch.tensor(float(self.held != fingerprint(self.weights.model)), device=self.accelerator.device)
        return self.accelerator.reduce(changed, "sum").item() > 0

    def mark_current(self) -> None:
        """Notes at the end of a sync which weights the engine holds."""
        self.held, self.is_current = fingerprint(self.weights.model), True

    # Noise

    def read_norms(self) -> dict[str, Tensor]:
        """Clean weights of the norms that are noised, by the engine's names, in the order of the layers."""
        raise NotImplementedError

    def write_norms(self, values: dict[str, Tensor]) -> None:
        """Writes norm weights in place and forgets what was computed with those before."""
        raise NotImplementedError

    @torch.no_grad()
    def lay_noise(self, noise: RolloutNoise) -> None:
        """
        Lays `noise` on the engine's norms, from their clean weights: it never accumulates (QeRL eq. 8), and with sigma
        0 they come back bit for bit.
        """
        if noise == self._laid or noise.sigma == self._laid.sigma == 0:
            return
        self._clean_norms = self._clean_norms or self.read_norms()
        # The noise is keyed by the policy's names, which vLLM may map to others in the same order.
        keys = noised_norms(self.weights.model_type, self.weights.parameters())
        sigma = noise.sigma * self.uaq_scale
        noised = {
            name: norm_noise(clean, sigma, noise.seed, noise.step, key, noise.draw)
            for key, (name, clean) in zip(keys, self._clean_norms.items(), strict=True)
        }
        self.write_norms(noised)
        self._laid = noise
        z = torch.cat([noised[name].float() - clean.float() for name, clean in self._clean_norms.items()])
        self.effective_sigma = z.square().mean().sqrt().item() / self.uaq_scale

    def forget_noise(self) -> None:
        """After a sync brought clean norm weights."""
        self._clean_norms, self._laid, self.effective_sigma = {}, RolloutNoise(), 0.0

    # Metrics

    def noise_metrics(self) -> dict[str, float]:
        """What the noise of this generation should be, how many norms hold it, and what arrived."""
        norms = float(len(self._clean_norms)) if self._laid.sigma else 0.0
        arrived = {"noise/norms": norms, "noise/effective_sigma": self.effective_sigma}
        return {"noise/sigma": self.noise.sigma} | arrived

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self.sync_metrics = self.sync_metrics, {}
        return taken


def count_layers(policy: nn.Module, precision: str) -> int:
    """Number of a policy's linear layers that engines quantize; `ValueError` if there are none."""
    count = len(dense_linears(policy))
    if not count:
        raise ValueError(
            f"`rollout_precision`={precision!r}: {type(policy).__name__} has no linear layers in its decoder "
            "to quantize (GPT-2's are convolutions). Use another model, or leave `rollout_precision` unset."
        )
    return count
