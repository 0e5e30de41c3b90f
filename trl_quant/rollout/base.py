"""The base of this package's engines.

[`RolloutEngine`] adds what a run needs to the protocol of [`~rollout.engine.Engine`]: whether the engine holds the
policy's current weights, noise, metrics and checkpoints. [`AdaptedEngine`] adds the same to any other engine.

A generation samples the completions of one batch of prompts. It has one turn, or several with tools, environments or a
`rollout_func`, and the number of turns may differ from rank to rank. Each turn is a call of `draw`. Everything that all
ranks must do together happens once, before the first turn:

    with engine.generation():       # sync, self-check, noise
        engine.draw(...)            # the first turn
        engine.draw(...)            # further turns, on this rank alone
                                    # on exit the engine sleeps, if sleep mode is on
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..formats import QuantizedTensor
from ..models.families import is_tested, token_of_images
from ..models.linears import sampled_linears
from ..models.routers import routers
from ..noise import noised_norms, norm_noise
from ..run_spec import EngineSpec
from .answers import Column, fault_of_samples
from .drift import WeightDrift
from .engine import Engine, Enough, Request, RolloutNoise, Samples
from .faults import fault_of
from .fingerprint import Fingerprint, fingerprint
from .function import first_change, function_of
from .kept import fault_of_kept
from .routing import fault_of_routing
from .sampling_options import breaks_when_continued
from .settings import divided
from .tokenizer import check_tokenizer, id_list
from .weights import PolicyWeights


logger = logging.getLogger(__name__)


class RolloutEngine:
    """
    Base of our engines. A subclass implements `sync`, `sample`, and for noise `read_norms` and `write_norms`.

    Parameters:
        model (`nn.Module`): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        processing_class: The tokenizer or processor; `None` if nothing is converted to text.
        precision (`str`):
            Number format of the engine, a key of [`~precisions.PRECISIONS`].
        wide_norms (`bool`, *optional*, defaults to `False`):
            Whether the engine holds the norms that get noise in FP32. BF16 values just above 1 are 0.0078 apart, so
            noise of 1e-3 would be rounded away.
        uaq_scale (`float`, *optional*, defaults to `1.0`):
            UAQ's factor s. The noise on a norm that was scaled by s is s Z, so that the effective noise Z / w (QeRL
            eq. 12) has the standard deviation sigma.
        settings: The fields of [`~rollout.settings.SamplingSettings`] and of [`~rollout.settings.VLLMSettings`].

    Attributes:
        settings ([`~rollout.settings.SamplingSettings`]):
            How completions are drawn. [`~rollout.trl_face.QuantGeneration`] sets it before each turn.
        vllm ([`~rollout.settings.VLLMSettings`]): Where vLLM runs, for the engines that use it.
        weights ([`~rollout.weights.PolicyWeights`]):
            The policy's current weights.
        noise (`RolloutNoise`):
            Noise of the next generation, the same for all of its turns. The trainer sets it.
        is_current (`bool`):
            Whether the engine holds the weights of the last sync.
        is_generating (`bool`):
            Whether a generation has begun and not ended.
        held ([`~rollout.fingerprint.Fingerprint`] or `None`):
            That of the policy at the last sync.
        effective_sigma (`float`):
            Standard deviation, over all channels, of the noise that the norms hold: (stored - clean) / s.
        sync_metrics (`dict[str, float]`):
            Metrics of the last sync, see [`~rollout.drift.WeightDrift.metrics`]. A sync that only restores weights
            that the engine lost while it slept does not change them.
        drift ([`~rollout.drift.WeightDrift`]):
            Measures each sync.
        ask_prompts (`Callable` or `None`):
            Returns token ids of the run's own prompts, which a check compares. The trainer sets it.
        checked_rows (`list[list[int]]` or `None`):
            The rows that checks compare; `None` until some of the run's prompts are known.
        ends_early (`bool`):
            Whether a call of `sample` can end before all completions have, and a later one go on with them.
        reads_images (`bool`):
            Whether the engine processes the images of its requests by itself. If not, its `sample` also takes what the
            processor has made of them.
        refuses_images (`str` or `None`):
            Why requests may have no images; `None` if they may.
        returns_routing (`bool`):
            Whether the samples have the [`~rollout.routing`] of a mixture of experts.
        returns_kept (`bool`):
            Whether samples that were drawn with `top_p`, `top_k` or `min_p` have the tokens that these left
            ([`~rollout.kept`]).
    """

    ends_early = reads_images = True
    refuses_images: str | None = None
    returns_routing = returns_kept = False

    def __init__(
        self,
        model,
        accelerator,
        processing_class,
        *,
        precision: str,
        wide_norms: bool = False,
        uaq_scale: float = 1.0,
        **settings,
    ):
        self.settings, self.vllm = divided(settings)
        self.model, self.accelerator, self.processing_class = model, accelerator, processing_class
        weights = PolicyWeights(model, accelerator)
        if processing_class is not None:
            vocabulary = weights.base_model.config.get_text_config().vocab_size
            check_tokenizer(getattr(processing_class, "tokenizer", processing_class), vocabulary)
        faults = [fault for fault in gather_object([fault_of(weights)]) if fault is not None]
        if faults:
            raise ValueError(f"`rollout_precision`={precision!r} cannot sample from the policy: {faults[0]}")
        self.precision = precision
        self.wide_norms, self.uaq_scale = wide_norms, uaq_scale
        self.weights = weights
        self.drift = WeightDrift(weights.trained(), precision)
        self.noise = RolloutNoise()
        self.sync_metrics: dict[str, float] = {}
        self.ask_prompts: Callable[[], list[list[int]]] | None = None
        self.checked_rows: list[list[int]] | None = None
        self._checked_functions: list[dict] = []
        self.is_current = False
        self.held: Fingerprint | None = None
        self.effective_sigma = 0.0
        self._added_noise = RolloutNoise()  # the noise that the norms hold
        self._clean_norms: dict[str, Tensor] = {}
        self.is_generating = False
        self._turns = 0

    @property
    def tokenizer(self):
        """The trainer's tokenizer, or that of its processor."""
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    @property
    def image_token(self) -> int | None:
        """The policy's [`~models.families.token_of_images`]."""
        return token_of_images(self.weights.base_model.config)

    @property
    def context(self) -> int | None:
        """The longest sequence that the engine takes, in tokens; `None` if only the policy limits it."""
        return None

    @property
    def vocabulary(self) -> int:
        """Number of the policy's tokens."""
        return self.weights.base_model.config.get_text_config().vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a completion: the tokenizer's, if it has one, and those that the model declares."""
        declared = id_list(self.model.generation_config.eos_token_id)
        return list(dict.fromkeys([*id_list(self.tokenizer.eos_token_id), *declared]))

    @property
    def needs_first_check(self) -> bool:
        """
        Whether the policy is of no family in the table ([`~models.families`]), and the engine not checked yet. The
        check has no image, so it cannot be asked of a policy that reads more than text.
        """
        config = self.weights.base_model.config
        return not self._checked_functions and config.get_text_config() is config and not is_tested(config)

    # Methods that a subclass implements

    def sync(self) -> None:
        """
        Copies the policy's current weights into the engine, without noise, and sets `sync_metrics`. All ranks must call
        it.
        """
        raise NotImplementedError

    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        """Samples one completion for each request, with the current `settings`; see [`~rollout.engine.Engine`]."""
        raise NotImplementedError

    def read_norms(self) -> dict[str, Tensor]:
        """Returns the clean weights of the norms that get noise, by the engine's names, in the order of the layers."""
        raise NotImplementedError

    def write_norms(self, values: dict[str, Tensor]) -> None:
        """Writes norm weights in place, and clears caches that depend on the old ones."""
        raise NotImplementedError

    # Sample

    def draw(
        self,
        requests: list[Request],
        profiler: AbstractContextManager | None = None,
        enough: Enough | None = None,
        processed: Mapping[str, Any] | None = None,
    ) -> Samples:
        """
        Samples one turn of a generation, and checks the samples.

        Args:
            requests (`list[Request]`): The requests of this rank.
            profiler (context manager, *optional*): Times the sampling.
            enough (`Callable`, *optional*): Ends the call early; see [`~rollout.engine.Engine`].
            processed (`Mapping`, *optional*): The processor's results for the requests' images, such as `pixel_values`.

        Raises:
            `ValueError`: A request has as many tokens already as its completion may have, or images that the engine
                refuses, or a sampling option would act otherwise on the rest of a completion than on the whole.
            `RuntimeError`: A policy cannot have sampled this; see [`~rollout.answers.fault_of_samples`].
        """
        most = self.settings.most_tokens
        for row, request in enumerate(requests):
            if most is not None and len(request.sampled) >= most:
                found = len(request.sampled)
                raise ValueError(
                    f"Request {row} has {found} sampled tokens already, and its completion may have {most}."
                )
        if self.refuses_images is not None and any(request.images for request in requests):
            raise ValueError(self.refuses_images)
        settings = self.settings
        wrong = breaks_when_continued(settings.generation_kwargs, settings.structured_outputs_regex)
        if wrong and any(request.sampled for request in requests):
            raise ValueError(
                f"A request has `sampled` tokens, and the options {wrong} act on a completion from its start: the "
                "rest would be sampled otherwise than in one call. Leave them unset, or sample whole completions."
            )
        given = {} if enough is None else {"enough": enough}
        if processed and not self.reads_images:
            given["processed"] = processed
        with self.generation(), profiler or nullcontext():
            samples = self.sample(requests, **given)
        logps = None if samples.logps is None else [*map(Column, samples.logps)]
        asked = {"count": len(requests), "vocabulary": self.vocabulary, "most": most}
        fault = fault_of_samples(samples.token_ids, logps, None, ended=samples.ended, **asked)
        if fault is None and samples.routing is not None:
            fault = self._fault_of_routing(requests, samples)
        if fault is None and samples.kept is not None:
            fault = fault_of_kept(samples.kept, samples.token_ids, self.vocabulary)
        if fault is not None:
            raise RuntimeError(f"The engine returned samples that the policy cannot have drawn: {fault}.")
        return samples

    def _fault_of_routing(self, requests: list[Request], samples: Samples) -> str | None:
        policy = self.weights.base_model
        lengths = [len(one.given) + len(ids) for one, ids in zip(requests, samples.token_ids, strict=True)]
        layers = policy.config.get_text_config().num_hidden_layers
        return fault_of_routing(samples.routing, lengths, layers, routers(policy))

    # Generations

    @contextmanager
    def generation(self) -> Iterator[None]:
        """
        Context of one generation with any number of turns. Entering it is collective and prepares the engine; later
        turns need no other rank. A nested context does nothing.
        """
        if self.is_generating:
            self._turns += 1
            yield
            return
        self.prepare()
        self.is_generating = True
        try:
            yield
        finally:
            self.is_generating = False
        self.rest()

    def requests(self) -> int | None:
        """Returns the number of sampling requests so far; `None` if the engine cannot count all of them."""
        return self._turns

    def prepare(self) -> None:
        """
        Makes the engine ready to sample, with the policy's weights and the generation's noise. All ranks must call it.
        """
        self.ensure_ready()
        self.lay_noise(self.noise)

    def rest(self) -> None:
        """Called after the last turn of a generation."""

    def ensure_ready(self) -> bool:
        """Syncs the engine if it has no weights, or has lost them. Returns whether the engine was woken from sleep."""
        if not self.is_current:
            metrics = self.sync_metrics
            self.sync()
            self.sync_metrics = metrics  # this sync restores weights that were measured before
        return False

    def is_stale(self) -> bool:
        """
        Whether the policy's weights changed since the last sync, for any reason: an optimizer step, averaged weights
        that an evaluation swaps in, `load_state_dict`, another active adapter. All ranks must call it, and it is true
        on all of them if it is true on one.

        Hooks do not count as weights, nor do values outside of parameters and buffers, such as a norm's epsilon:
        engines take those from the config. See [`function_changed`].
        """
        changed = torch.tensor(float(self.held != fingerprint(self.weights.model)), device=self.accelerator.device)
        return self.accelerator.reduce(changed, "sum").item() > 0

    def function_changed(self) -> bool:
        """
        Whether what can be seen of the policy's [`~rollout.function`] is new since the last [`mark_checked`]. All ranks
        must call it, and it is true on all of them if it is true on one.
        """
        is_new = function_of(self.weights.model) not in self._checked_functions
        changed = torch.tensor(float(is_new), device=self.accelerator.device)
        return self.accelerator.reduce(changed, "sum").item() > 0

    def changed_module(self) -> str | None:
        """Returns the name of a module of the policy that has changed since the last [`mark_checked`], or `None`."""
        if not self._checked_functions:
            return None
        return first_change(self._checked_functions[-1], function_of(self.weights.model))

    def mark_checked(self) -> None:
        """
        Records that the engine was found to compute the policy's function as it is now, and as it was before. The first
        time it says what was not tested of a family outside the table.
        """
        if self.needs_first_check and self.accelerator.is_main_process:
            logger.warning(
                "`model_type`=%r is not among the families that docs/models.md lists. The %s engine computes what the "
                "policy does; adapters, saved and resumed runs and further syncs were not tried in this family, and "
                "noise, UAQ, packed rows, `train_precision` and `exact_rollouts` are refused.",
                self.weights.base_model.config.model_type,
                self.precision,
            )
        self._checked_functions = [*self._checked_functions[-3:], function_of(self.weights.model)]

    def mark_current(self, sent: Fingerprint | None = None) -> None:
        """Records, at the end of a sync, that the engine holds the weights `sent`, by default the policy's current."""
        self.held, self.is_current = sent or fingerprint(self.weights.model), True

    # The policy's weights

    def policy_stream(
        self, placeholders: Collection[str] = (), groups: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Streams the policy's weights; see [`~rollout.weights.PolicyWeights.stream`]."""
        return self.weights.stream(placeholders, groups)

    def quantized_in_training(self, measured: bool = True) -> set[str]:
        """
        Returns the names of the weights that [`quantized_as_trained`] replaces, so that nobody reads their dense
        values. `measured` leaves out those that the drift is measured by.
        """
        names = self.weights.quantized_weights(self.precision)
        return {name for name in names if not (measured and self.drift.measures(name))}

    def quantized_as_trained(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """
        Yields the policy's `weights`. If the policy trains in the engine's precision, its quantized weights replace the
        dense ones.
        """
        quantized = self.weights.quantized_weights(self.precision)
        for name, tensor in weights:
            yield name, quantized[name]() if name in quantized else tensor

    # Checkpoints

    def state_dict(self) -> dict:
        """Returns the state with which a resumed run logs the same metrics as an unbroken one."""
        compared = {"initial_weights": self.drift.initial, "synced_weights": self.drift.synced}
        return compared | {"sync_metrics": self.sync_metrics}

    def load_state_dict(self, state: dict) -> None:
        """
        Loads the result of [`state_dict`]. If it lacks the initial weights, the total update is not measured; if it
        lacks the synced weights, the update until the next sync is not measured.
        """
        self.drift.initial, self.drift.resumed = state.get("initial_weights"), state.get("synced_weights") or {}
        self.sync_metrics = state.get("sync_metrics", {})

    # Noise

    @torch.no_grad()
    def lay_noise(self, noise: RolloutNoise) -> None:
        """
        Adds `noise` to the clean weights of the engine's norms. Noise never accumulates (QeRL eq. 8), and sigma 0
        restores the clean weights bit for bit.
        """
        if noise == self._added_noise or noise.sigma == self._added_noise.sigma == 0:
            return
        self._clean_norms = self._clean_norms or self.read_norms()
        # The policy's names seed the noise. vLLM may have other names, in the same order.
        keys = noised_norms(self.weights.model_type, self.weights.parameters())
        sigma = noise.sigma * self.uaq_scale
        noised = {
            name: norm_noise(clean, sigma, noise.seed, noise.step, key, noise.draw)
            for key, (name, clean) in zip(keys, self._clean_norms.items(), strict=True)
        }
        self.write_norms(noised)
        self._added_noise = noise
        z = torch.cat([noised[name].float() - clean.float() for name, clean in self._clean_norms.items()])
        self.effective_sigma = z.square().mean().sqrt().item() / self.uaq_scale

    def forget_noise(self) -> None:
        """Called after a sync has overwritten the norms with clean weights."""
        self._clean_norms, self._added_noise, self.effective_sigma = {}, RolloutNoise(), 0.0

    # Metrics

    def noise_metrics(self) -> dict[str, float]:
        """Returns the scheduled sigma, the number of norms that hold noise, and the sigma that is effective in them."""
        norms = float(len(self._clean_norms)) if self._added_noise.sigma else 0.0
        return {
            "noise/sigma": self.noise.sigma,
            "noise/norms": norms,
            "noise/effective_sigma": self.effective_sigma,
        }

    def take_metrics(self) -> dict[str, float]:
        """Returns and clears the metrics measured since the last call, for a generation of the training."""
        self.drift.take()
        taken, self.sync_metrics = self.sync_metrics, {}
        return taken


class AdaptedEngine(RolloutEngine):
    """
    Adds what a run needs to any other [`~rollout.engine.Engine`]. It is synced at each step, and between steps if the
    policy's weights have changed. It gets no noise.

    Parameters:
        engine ([`~rollout.engine.Engine`]): The engine.
        spec ([`~rollout.EngineSpec`]): The engine that the configuration describes.
        given: The arguments of [`RolloutEngine`], except the precision.

    Raises:
        `ValueError`: It is no engine, or the configuration uses a feature that only the engines of this package have.
    """

    def __init__(self, engine: Engine, spec: EngineSpec, **given):
        unsupported = {
            "`noise_schedule`": spec.wide_norms,
            "`exact_rollouts`": spec.exact,
        }
        refused = [name for name, is_set in unsupported.items() if is_set]
        if refused:
            raise ValueError(
                f"{' and '.join(refused)} acts only on the engines of this package, and the run samples from a "
                f"{type(engine).__name__}. Leave it unset."
            )
        missing = [name for name in ("sync", "sample") if not callable(getattr(engine, name, None))]
        if missing:
            raise ValueError(
                f"`build_engine` returned a {type(engine).__name__} without {' and '.join(missing)}, so a run cannot "
                "sample from it. Return an engine: see `rollout.engine.Engine`."
            )
        super().__init__(precision=spec.precision, **given)
        self.engine = engine
        self.ends_early = "enough" in signature(engine.sample).parameters
        self.returns_routing = getattr(engine, "returns_routing", False)
        self.returns_kept = getattr(engine, "returns_kept", False)

    def sync(self) -> None:
        self.engine.sync()
        self.mark_current()

    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        if enough is None and not any(request.sampled for request in requests):
            return self.engine.sample(requests)
        if not self.ends_early:
            raise ValueError(
                f"{type(self.engine).__name__}.sample has no argument `enough`, so it samples only whole completions."
            )
        return self.engine.sample(requests, enough)


def count_layers(policy: nn.Module, precision: str) -> int:
    """Returns the number of a policy's linear layers that engines quantize. Raises `ValueError` if there are none."""
    count = len(sampled_linears(policy))
    if not count:
        raise ValueError(
            f"`rollout_precision`={precision!r}: {type(policy).__name__} has no linear layers in its decoder "
            "to quantize (GPT-2's are convolutions). Use another model, or leave `rollout_precision` unset."
        )
    return count
