"""Between engines and TRL: how TRL's trainers drive an engine, and what our engines use of TRL.

TRL's trainers call two methods of their `vllm_generation`: `sync_weights` and `generate`. [`RolloutEngine`], the base
of our engines, has both and implements them with the protocol's `sync` and `sample`. [`AdaptedEngine`] gives them to
any other [`~rollout.engine.Engine`].

An engine inherits nothing from TRL. It holds a [`TRLGeneration`], the one subclass of TRL's `VLLMGeneration`, which
keeps TRL's settings and runs TRL's own code where vLLM samples.

A generation answers one batch of prompts. It has one turn, or as many as tools, environments and a `rollout_func` take,
which may differ from rank to rank. Each turn is a call of `generate`. What all ranks must do together happens once,
before the first turn:

    with engine.generation():       # the policy's weights, the self-check, the noise
        engine.generate(...)        # the first turn
        engine.generate(...)        # further turns, of this rank alone
                                    # at the end the engine sleeps, if it is set to
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from ..formats import QuantizedTensor
from ..models.linears import dense_linears
from ..noise import noised_norms, norm_noise
from ..trl_seams import exchanged
from .drift import WeightDrift
from .engine import Engine, RolloutNoise, Samples
from .fingerprint import fingerprint
from .spec import EngineSpec
from .stream import PolicyWeights, fault_of
from .tokenizer import check_tokenizer


class TRLGeneration(VLLMGeneration):
    """
    TRL's part of an engine: its settings, its walk through a policy that FSDP1 shards, and its use of vLLM.

    Constructing it starts nothing, so that an engine is complete before vLLM runs.

    Parameters:
        policy_weights ([`~rollout.stream.PolicyWeights`]): The policy's weights.
        args, kwargs: The arguments of TRL's `VLLMGeneration`.
    """

    def __init__(self, policy_weights: PolicyWeights, *args, **kwargs):
        self.policy_weights = policy_weights
        super().__init__(*args, **kwargs)

    def _init_vllm(self):
        """Does nothing yet: an engine that uses vLLM calls [`start_vllm`]."""

    def start_vllm(self) -> None:
        """Starts vLLM, or connects to its server, as TRL does."""
        super()._init_vllm()

    @property
    def announced(self) -> list[tuple] | None:
        """Name, type and shape of each tensor that a sync sends to a server; `None` before [`announce`]."""
        return self._weight_metadata

    def announce(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Records the tensors of a sync for the server. Collective."""
        self._weight_metadata = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in stream
        ]

    def _iter_named_params(self):
        """The policy's weights as [`PolicyWeights`] reads them; TRL itself walks through a policy of FSDP1."""
        if self.policy_weights.sharding.fsdp_version == 1:
            return super()._iter_named_params()
        return iter(self.policy_weights)


class RolloutEngine:
    """
    Base of our engines. An engine implements `sync`, `sample`, and where it can hold noise `read_norms` and
    `write_norms`. It takes the arguments that TRL gives to its `VLLMGeneration`, and:

    Parameters:
        precision (`str`):
            Number format of the copy, a key of [`~precisions.PRECISIONS`].
        wide_norms (`bool`, *optional*, defaults to `False`):
            Whether the engine holds the norms that get noise in FP32. A BF16 weight near 1 has a spacing of 0.0078, in
            which noise of 1e-3 disappears.
        uaq_scale (`float`, *optional*, defaults to `1.0`):
            UAQ's s. The noise on a norm that was scaled by s is s Z, so that the noise which acts, Z / w (QeRL eq. 12),
            has the standard deviation sigma.

    Attributes:
        trl ([`TRLGeneration`]):
            TRL's part. Each attribute that it has (`model`, `accelerator`, `max_completion_length`, `llm` and so on)
            stands there alone: the engine reads and writes it there.
        weights ([`~rollout.stream.PolicyWeights`]):
            The policy's weights as they are now.
        noise (`RolloutNoise`):
            Noise of the next generation, the same for all of its turns; the trainer sets it.
        is_current (`bool`):
            Whether the engine holds the weights of the last sync.
        held (`Hashable`):
            The [`~rollout.fingerprint.fingerprint`] of the policy at the last sync.
        effective_sigma (`float`):
            Standard deviation of the noise that the norms hold, (stored - clean) / s, over all channels.
        multimodal_fields (`dict`):
            What the processor made of the prompts' images (`pixel_values` and the like); the trainer sets it.
        sync_metrics (`dict[str, float]`):
            What the last sync measured, see [`~rollout.drift.WeightDrift.metrics`]. A sync that only restores weights
            which the engine had lost does not count.
        drift ([`~rollout.drift.WeightDrift`]):
            What measures a sync.
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
        generation_kwargs: dict | None = None,
        **kwargs,
    ):
        weights = PolicyWeights(model, accelerator)
        if processing_class is not None:
            vocabulary = weights.base_model.config.get_text_config().vocab_size
            check_tokenizer(getattr(processing_class, "tokenizer", processing_class), vocabulary)
        if fault := next(filter(None, gather_object([fault_of(weights)])), None):
            raise ValueError(f"`rollout_precision`={precision!r} cannot sample from the policy: {fault}")
        # TRL would hand an option of `None` to vLLM; here it means that the option is not given
        given = {name: value for name, value in (generation_kwargs or {}).items() if value is not None}
        self.trl = TRLGeneration(
            weights, model, accelerator, processing_class, *args, generation_kwargs=given, **kwargs
        )
        self.precision = precision
        self.wide_norms, self.uaq_scale = wide_norms, uaq_scale
        self.weights = weights
        self.drift = WeightDrift(weights.trained(), precision)
        self.noise = RolloutNoise()
        self.multimodal_fields: dict = {}
        self.sync_metrics: dict[str, float] = {}
        self.is_current = False
        self.held: Hashable = None
        self.effective_sigma = 0.0
        self._laid = RolloutNoise()  # the noise that the norms carry
        self._clean_norms: dict[str, Tensor] = {}
        self._is_generating = False
        self._turns = 0

    # TRL's attributes

    @property
    def __class__(self) -> type:
        """
        TRL's class for `isinstance`, beside the engine's own: code that asks whether `trainer.vllm_generation` is a
        `VLLMGeneration` gets the answer that it gets of TRL's trainer. `type(engine)` is the engine's own class.
        """
        return TRLGeneration

    def __getattr__(self, name: str) -> Any:
        """Reads what the engine does not have itself from `trl`."""
        if name == "trl":  # the engine is not built yet
            raise AttributeError(f"{type(self).__name__} has no `trl` before its constructor has run")
        return getattr(self.trl, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Writes an attribute of TRL's to `trl`, where TRL reads it, and every other one here."""
        trl = vars(self).get("trl")
        owner = trl if trl is not None and name in vars(trl) else self
        object.__setattr__(owner, name, value)

    @property
    def tokenizer(self):
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def eos_token_ids(self) -> list[int]:
        """Every token that ends a completion: the tokenizer's, if it has one, and all that the model declares."""
        declared = self.model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        return list(dict.fromkeys(token for token in (self.tokenizer.eos_token_id, *declared) if token is not None))

    # What an engine implements

    def sync(self) -> None:
        """Takes over the policy's current weights, without noise; fills `sync_metrics`. Collective."""
        raise NotImplementedError

    def sample(self, prompts: list[list[int]], images: list | None = None) -> Samples:
        """Draws one completion for each prompt."""
        raise NotImplementedError

    def read_norms(self) -> dict[str, Tensor]:
        """Clean weights of the norms that get noise, by the engine's names, in the order of the layers."""
        raise NotImplementedError

    def write_norms(self, values: dict[str, Tensor]) -> None:
        """Writes norm weights in place and forgets what was computed with the old ones."""
        raise NotImplementedError

    # What TRL calls

    def sync_weights(self) -> None:
        """TRL's name for [`sync`]."""
        self.sync()

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """
        Samples one turn of a generation; see TRL's `VLLMGeneration.generate`.

        Args:
            prompts (`list[list[int]]`): Token ids, one list for each completion.
            images: The images of each prompt.
            num_generations (`int`): How often each prompt comes in a row.
            profiler: Context manager that times the sampling.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`; the last two of shape (batch, completion
            length, 1): the log-probability that each token was drawn with, and the token.
        """
        with self.generation(), profiler or nullcontext():
            samples = self.sample(prompts, images)
        logps = samples.logps
        if logps is None:
            logps = [[None] * len(ids) for ids in samples.token_ids]
        logprobs = [[[logp] for logp in row] for row in logps]
        return prompts, samples.token_ids, logprobs, [[[token] for token in ids] for ids in samples.token_ids]

    # Generations

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        Context of one generation with any number of turns. Entering it is collective: it brings the engine up to date
        with the policy, and no later turn needs another rank. A generation inside another one is part of that one.
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
        """How often the engine was asked to sample within generations; `None` if others may ask it unseen."""
        return self._turns

    def prepare(self) -> None:
        """Makes the engine ready to sample: with the policy's weights and the noise of this generation. Collective."""
        self.ensure_ready()
        self.lay_noise(self.noise)

    def rest(self) -> None:
        """Called when the last turn of a generation is over."""

    def ensure_ready(self) -> bool:
        """Syncs an engine that never had weights or lost them; returns whether it had to be woken for that."""
        if not self.is_current:
            metrics = self.sync_metrics
            self.sync_weights()
            self.sync_metrics = metrics  # those of the sync that began the step: this one moved nothing
        return False

    def is_stale(self) -> bool:
        """
        Whether the policy's weights changed since the last sync, for any reason: an optimizer step, averaged weights
        that an evaluation swaps in, `load_state_dict`, another active adapter. Collective: true on all ranks if it is
        true on one.

        Hooks do not count as weights, nor do numbers that a module holds outside its parameters and buffers, such as a
        norm's epsilon: engines take those from the config. vLLM also computes buffers, such as rotary frequencies, from
        the config. The self-check finds such a change if it moves log-probabilities by more than its bound.
        """
        changed = torch.tensor(float(self.held != fingerprint(self.weights.model)), device=self.accelerator.device)
        return self.accelerator.reduce(changed, "sum").item() > 0

    def mark_current(self) -> None:
        """Records at the end of a sync which weights the engine holds."""
        self.held, self.is_current = fingerprint(self.weights.model), True

    # The policy's weights

    def in_codes(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """`weights` of the policy; those that it computes with in the engine's precision as codes and scales."""
        layers = {f"{name}.weight": layer for name, layer in self.weights.unified(self.precision).items()}
        unread = {name for name in layers if not self.drift.measures(name)}
        with exchanged(self.weights, unread=unread):
            for name, tensor in weights:
                yield name, self.weights.codes(layers[name]) if name in layers else tensor

    # Checkpoints

    def state_dict(self) -> dict:
        """What a checkpoint must hold so that a resumed run logs what an unbroken one logs. Collective."""
        return {"drift": self.drift.since_sync(self._iter_named_params()), "initial_weights": self.drift.initial}

    def load_state_dict(self, state: dict) -> None:
        """Takes what [`state_dict`] returned. Without initial weights in it, the total update is not measured."""
        self.drift.resumed, self.drift.initial = state.get("drift", {}), state.get("initial_weights")

    # Noise

    @torch.no_grad()
    def lay_noise(self, noise: RolloutNoise) -> None:
        """
        Adds `noise` to the clean weights of the engine's norms. It never accumulates (QeRL eq. 8), and sigma 0 restores
        the clean weights bit for bit.
        """
        if noise == self._laid or noise.sigma == self._laid.sigma == 0:
            return
        self._clean_norms = self._clean_norms or self.read_norms()
        # The policy's names are the noise's keys. vLLM may have other names, in the same order.
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
        """Called after a sync has brought clean norm weights."""
        self._clean_norms, self._laid, self.effective_sigma = {}, RolloutNoise(), 0.0

    # Metrics

    def noise_metrics(self) -> dict[str, float]:
        """The noise that this generation should have, how many norms hold it, and how much of it arrived."""
        norms = float(len(self._clean_norms)) if self._laid.sigma else 0.0
        arrived = {"noise/norms": norms, "noise/effective_sigma": self.effective_sigma}
        return {"noise/sigma": self.noise.sigma} | arrived

    def take_metrics(self) -> dict[str, float]:
        """The metrics that were measured since the last call."""
        taken, self.sync_metrics = self.sync_metrics, {}
        return taken


class AdaptedEngine(RolloutEngine):
    """
    Any [`~rollout.engine.Engine`], as TRL's trainers drive it. It is synced at each step, and between steps if the
    policy's weights have changed. It gets no noise.

    Parameters:
        engine ([`~rollout.engine.Engine`]): The engine.
        spec ([`~rollout.EngineSpec`]): The engine that the configuration means.
        args, kwargs: The arguments of TRL's `VLLMGeneration`.

    Raises:
        `ValueError`: if the configuration asks for what only the engines of this package can do.
    """

    def __init__(self, engine: Engine, spec: EngineSpec, *args, **kwargs):
        asked = {
            "`rollout_precision`='auto'": spec.precision == "auto",
            "`noise_schedule`": spec.wide_norms,
            "`exact_rollouts`": spec.exact,
        }
        if refused := [name for name, is_set in asked.items() if is_set]:
            raise ValueError(
                f"{' and '.join(refused)} acts on the engines of this package alone, and the run samples from a "
                f"{type(engine).__name__}."
            )
        super().__init__(*args, precision=spec.precision, **kwargs)
        self.engine = engine

    def sync(self) -> None:
        self.engine.sync()
        self.mark_current()

    def sample(self, prompts: list[list[int]], images: list | None = None) -> Samples:
        return self.engine.sample(prompts, images)


def adapted(engine: Engine, spec: EngineSpec, *args, **kwargs) -> RolloutEngine:
    """The engine, in an [`AdaptedEngine`] if it is not one of ours."""
    return engine if isinstance(engine, RolloutEngine) else AdaptedEngine(engine, spec, *args, **kwargs)


def count_layers(policy: nn.Module, precision: str) -> int:
    """Number of a policy's linear layers that engines quantize; `ValueError` if there are none."""
    count = len(dense_linears(policy))
    if not count:
        raise ValueError(
            f"`rollout_precision`={precision!r}: {type(policy).__name__} has no linear layers in its decoder "
            "to quantize (GPT-2's are convolutions). Use another model, or leave `rollout_precision` unset."
        )
    return count
