"""The one description of a run, made from its configuration before a model, vLLM or a trainer is loaded.

| part | answers | values |
|---|---|---|
| `training` | what does the policy compute with? | [`Training`], in one of four kinds |
| `sampler` | what samples? | an [`EngineSpec`]; `None` if TRL generates |
| `correction` | what weighs the loss? | a key of [`~corrections.ALL_CORRECTIONS`] |
| `adapter` | how does a LoRA adapter reach the sampler? | `"merge"`, `"adapter"`; `None` if there is no adapter |
| `packs` | does the policy compute rows without padding? | yes, no; `None` for "where it can" |
| `replays` | does a mixture compute tokens with the sampler's experts? | the same |

The defaults that follow from other fields have their home here: those of `rollout_precision`, `is_correction`,
`lora_sync` and `vllm_sleep_level`. An [`EngineSpec`] says which engine samples:

| source of the samples | `kind` | class |
|---|---|---|
| a quantized copy of the policy in transformers | `"embedded"` | `TransformersEngine` |
| the policy's own layers, if they already compute in that precision | `"shared"` | `SharedEngine` |
| the policy's frozen base, with an adapter as it was at a sync | `"beside"` | `FrozenBaseEngine` |
| vLLM in the trainer's process | `"colocate"` | `VLLMEngine` |
| vLLM behind a server | `"server"` | `VLLMServerEngine` |
| for masked diffusion: a quantized copy of the policy | `"diffusion"` | `DiffusionEngine` |
| the same with the policy's own layers, as for `"shared"` | `"shared_diffusion"` | `SharedDiffusionEngine` |

Trainers, `trl-quant choose`, `trl-quant report --mismatch` and the benchmarks all build their engine from one with
[`~rollout.build_engine`].
"""

from dataclasses import dataclass
from typing import Any

from .precisions import frozen_bases, qat_precisions, unified_flows


# kind -> name of the class in `trl_quant.rollout`
ENGINES = {
    "embedded": "TransformersEngine",
    "shared": "SharedEngine",
    "beside": "FrozenBaseEngine",
    "colocate": "VLLMEngine",
    "server": "VLLMServerEngine",
    "diffusion": "DiffusionEngine",
    "shared_diffusion": "SharedDiffusionEngine",
}
VLLM_MODES = ("colocate", "server")  # the kinds that are values of TRL's `vllm_mode`
DISCARDS = 2  # vLLM's sleep level that gives all memory back

# kind of an embedded engine -> the kind that denoises instead of sampling from left to right
_DENOISING = {"embedded": "diffusion", "shared": "shared_diffusion"}
_EVERY_ENGINE = ("precision", "wide_norms", "uaq_scale")
_OF_GENERATE = (*_EVERY_ENGINE, "cache_implementation", "returns_kept")
_SCHEDULE = ("block_length", "tokens_per_step", "cache_finished_blocks", "mask_token_id")
_IN_PROCESS = ("lora_sync", "sleep_level", "exact", "returns_routing", "returns_kept")
_OF_DENOISING = (*_SCHEDULE, "wide_head", "shows_progress")
# kind -> the fields of `EngineSpec` that the engine's class takes as arguments
_OPTIONS = {
    "embedded": _OF_GENERATE,
    "shared": _OF_GENERATE,
    "beside": _OF_GENERATE,
    "colocate": (*_EVERY_ENGINE, "sync_check_steps", "engine_kwargs", *_IN_PROCESS),
    "server": (*_EVERY_ENGINE, "sync_check_steps", "request_timeout", "main_samples"),
    "diffusion": (*_EVERY_ENGINE, *_OF_DENOISING),
    "shared_diffusion": (*_EVERY_ENGINE, *_OF_DENOISING),
}


@dataclass(frozen=True)
class EngineSpec:
    """
    The description of an engine, from which [`~rollout.build_engine`] builds it.

    Parameters:
        kind (`str`):
            Key of [`ENGINES`].
        precision (`str`):
            Key of [`~precisions.PRECISIONS`].
        wide_norms (`bool`, *optional*, defaults to `False`):
            Whether the engine holds the norms that get noise in FP32.
        uaq_scale (`float`, *optional*, defaults to `1.0`):
            Factor by which UAQ has scaled the norms.
        sync_check_steps (`int`, *optional*, defaults to `0`):
            Number of syncs between two self-checks of a vLLM engine; 0 for no self-checks.
        engine_kwargs (`dict`, *optional*):
            Further arguments of vLLM's `LLM`.
        lora_sync (`str`, *optional*, defaults to `"merge"`):
            How a LoRA adapter reaches the engine: `"merge"` or `"adapter"`.
        sleep_level (`int`, *optional*, defaults to `0`):
            vLLM's sleep level while the trainer computes; 0 if the engine stays awake.
        exact (`bool`, *optional*, defaults to `False`):
            Whether the results for a token must not depend on the other tokens of its batch.
        returns_routing (`bool`, *optional*, defaults to `False`):
            Whether vLLM is asked for the routing of a mixture of experts. An embedded engine always returns it.
        returns_kept (`bool`, *optional*, defaults to `False`):
            Whether the engine returns what `top_p`, `top_k` and `min_p` left to draw each token from.
        request_timeout (`float`, *optional*):
            Seconds that a server may take to answer; `None` for no limit.
        main_samples (`bool`, *optional*, defaults to `False`):
            Whether the main process alone asks a server for samples.
        cache_implementation (`str`, *optional*):
            The class of KV cache that an embedded engine samples with, by transformers' name.
        block_length, tokens_per_step (`int`, *optional*, defaults to `0`):
            How an engine of a masked diffusion model denoises; 0 in other engines.
        cache_finished_blocks (`bool`, *optional*, defaults to `False`):
            Whether the steps of a block share the keys and values of finished blocks.
        mask_token_id (`int`, *optional*):
            The mask token of a masked diffusion model; `None` for the tokenizer's or the model's own.
        wide_head (`bool`, *optional*, defaults to `False`):
            Whether the head of a masked diffusion model scores in FP32, as the trainer's does.
        shows_progress (`bool`, *optional*, defaults to `False`):
            Whether an engine of a masked diffusion model shows a progress bar of its denoising steps.
    """

    kind: str
    precision: str
    wide_norms: bool = False
    uaq_scale: float = 1.0
    sync_check_steps: int = 0
    engine_kwargs: dict | None = None
    lora_sync: str = "merge"
    sleep_level: int = 0
    exact: bool = False
    returns_routing: bool = False
    returns_kept: bool = False
    request_timeout: float | None = None
    main_samples: bool = False
    cache_implementation: str | None = None
    block_length: int = 0
    tokens_per_step: int = 0
    cache_finished_blocks: bool = False
    mask_token_id: int | None = None
    wide_head: bool = False
    shows_progress: bool = False

    @classmethod
    def from_config(cls, config) -> "EngineSpec | None":
        """Returns the engine that a [`QuantGRPOConfig`] describes; `None` if TRL generates by itself."""
        if config.rollout_precision is None:
            return None
        kind = engine_kind(
            config.vllm_mode if config.use_vllm else "embedded",
            config.rollout_precision,
            config.train_precision,
            is_apart=config.fsdp_version is not None or config.is_asynchronous,
            freezes_base=config.is_asynchronous and Training.from_config(config).freezes_base,
            denoises=config.denoises,
        )
        schedule = {}
        if config.denoises:
            schedule = {name: getattr(config, name) for name in _SCHEDULE}
            schedule |= {"wide_head": config.cast_lm_head_to_fp32, "shows_progress": not config.disable_tqdm}
        return cls(
            kind=kind,
            precision=config.rollout_precision,
            wide_norms=config.noise_schedule is not None,
            uaq_scale=1.0 if config.uaq_scale is None else config.uaq_scale,
            sync_check_steps=config.sync_check_steps,
            engine_kwargs=config.vllm_engine_kwargs,
            lora_sync=config.lora_sync,
            sleep_level=config.vllm_sleep_level if config.vllm_enable_sleep_mode else 0,
            exact=config.exact_rollouts,
            returns_routing=config.router_replay is not False,
            returns_kept=config.truncation_replay
            or (config.truncation_replay is None and config.has_rewards and kind not in VLLM_MODES),
            request_timeout=config.vllm_request_timeout,
            main_samples=config.is_asynchronous,
            cache_implementation=config.cache_implementation,
            **schedule,
        )

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM samples, in this process or behind a server."""
        return self.kind in VLLM_MODES

    def options(self) -> dict[str, Any]:
        """Returns the arguments that the engine's class takes in addition to those of TRL's `VLLMGeneration`."""
        return {name: getattr(self, name) for name in _OPTIONS[self.kind]}

    def fields_for_trl(self) -> dict[str, Any]:
        """
        Returns the values that the configuration must have in TRL's constructor so that TRL samples from this engine:
        TRL samples from an engine, and corrects for it, only if `use_vllm` is set.
        """
        return {} if self.is_vllm else {"use_vllm": True, "vllm_mode": "embedded"}


# Defaults of fields where no other field decides
INDEPENDENT = {"lora_sync": EngineSpec.lora_sync, "vllm_sleep_level": DISCARDS, "is_correction": "trl"}


def engine_kind(
    mode: str,
    precision: str,
    train_precision: str | None,
    is_apart: bool = False,
    freezes_base: bool = False,
    denoises: bool = False,
) -> str:
    """
    Returns the kind of engine that samples in `precision`, a key of [`ENGINES`].

    Args:
        mode (`str`): `"embedded"`, or one of [`VLLM_MODES`].
        precision (`str`): The `rollout_precision`.
        train_precision (`str` or `None`): The `train_precision`.
        is_apart (`bool`, *optional*, defaults to `False`):
            Whether the policy's own layers cannot sample: FSDP shards them, or they train meanwhile.
        freezes_base (`bool`, *optional*, defaults to `False`):
            Whether these are a base that does not train meanwhile, which then samples with an adapter of its own.
        denoises (`bool`, *optional*, defaults to `False`): Whether the policy is a masked diffusion model.
    """
    kind = mode
    if mode == "embedded" and precision == train_precision and (freezes_base or not is_apart):
        kind = "beside" if is_apart else "shared"
    return _DENOISING[kind] if denoises else kind


def default_precision(training: str | None, denoises: bool) -> str | None:
    """
    Returns the default of `rollout_precision`: a run samples in the numbers in which it trains. If those are not
    quantized, `None` leaves sampling to TRL; a masked diffusion model, which TRL cannot denoise, samples in BF16.

    Args:
        training (`str` or `None`): The `train_precision`.
        denoises (`bool`): Whether the policy is a masked diffusion model.
    """
    return "bf16" if training is None and denoises else training


def default_correction(precision: str | None, weighs_rewards: bool) -> str:
    """
    Returns the default of `is_correction`: TRL's own where TRL samples, else "tis" for a loss that weighs rewards. A
    distillation compares two models on the sampled tokens, whoever sampled them, and is not corrected.

    Args:
        precision (`str` or `None`): The `rollout_precision`.
        weighs_rewards (`bool`): Whether the loss is one of rewards that takes a correction's weights.
    """
    if precision is None:
        return INDEPENDENT["is_correction"]
    return "tis" if weighs_rewards else "none"


def default_lora_sync(mode: str, precision: str | None, training: str | None) -> str:
    """
    Returns the default of `lora_sync`: `"adapter"` if vLLM in this process samples from the same frozen 4-bit base that
    is trained, else `"merge"`.

    Args:
        mode (`str`): `"embedded"`, or one of [`VLLM_MODES`].
        precision (`str` or `None`): The `rollout_precision`.
        training (`str` or `None`): The `train_precision` of a policy with an adapter.
    """
    holds_same_base = training in frozen_bases() and precision == training
    return "adapter" if mode == "colocate" and holds_same_base else EngineSpec.lora_sync


def default_sleep_level(lora_sync: str) -> int:
    """Returns the default of `vllm_sleep_level`: 1 keeps the base, which no sync of an adapter alone brings back."""
    return 1 if lora_sync == "adapter" else DISCARDS


@dataclass(frozen=True)
class Training:
    """
    What the policy computes with.

    Parameters:
        kind (`str`, *optional*, defaults to `"none"`):
            One of four:

            | `kind` | weights | products |
            |---|---|---|
            | `"none"` | as loaded | of BF16 or FP32 |
            | `"frozen"` | an adapter over a base in codes alone | of the precision; of BF16 for 4 bits |
            | `"unified"` | of 16 or 32 bits, also with an adapter merged in | of the sampler's numbers |
            | `"qat"` | of 16 or 32 bits, all trained for 4 bits | of the 4-bit weights |
        precision (`str`, *optional*):
            The `train_precision`, a key of [`~precisions.PRECISIONS`]; `None` for the kind `"none"`.
    """

    kind: str = "none"
    precision: str | None = None

    @classmethod
    def from_config(cls, config) -> "Training":
        """
        Returns what a [`QuantGRPOConfig`] describes. Until the policy is known, it counts as one with an adapter. FSDP2
        shards only weights of 16 or 32 bits, so a base in codes of 8 bits is not held under it.
        """
        precision = config.train_precision
        kind = "none"
        if precision in unified_flows():
            is_held = config.is_adapted and config.lora_sync == "adapter" and config.fsdp_version is None
            kind = "frozen" if is_held else "unified"
        elif precision in qat_precisions() and not (config.is_adapted and precision in frozen_bases()):
            kind = "qat"
        elif precision in frozen_bases():
            kind = "frozen"
        return cls(kind, precision)

    @property
    def freezes_base(self) -> bool:
        """Whether an adapter trains over a base that is held in codes alone."""
        return self.kind == "frozen"

    @property
    def is_qat(self) -> bool:
        """Whether all weights are trained for 4 bits."""
        return self.kind == "qat"


@dataclass(frozen=True)
class RunSpec:
    """
    The description of a run.

    Parameters:
        training ([`Training`]):
            What the policy computes with.
        sampler ([`EngineSpec`] or `None`):
            The engine that samples; `None` if TRL generates.
        trls_sampler (`str` or `None`):
            The vLLM that TRL itself samples from, one of [`VLLM_MODES`]; `None` if there is an engine of ours, or the
            policy itself samples.
        correction (`str`):
            Key of [`~corrections.ALL_CORRECTIONS`].
        adapter (`str` or `None`):
            How a LoRA adapter reaches the sampler; `None` if the policy has none.
        packs (`bool` or `None`):
            Whether rows are computed without padding; `None` if they are wherever the models allow it.
        replays (`bool` or `None`):
            Whether a mixture of experts computes each token with the experts that sampled it; `None` if it does
            wherever the engine returns them.
    """

    training: Training
    sampler: EngineSpec | None
    trls_sampler: str | None
    correction: str
    adapter: str | None
    packs: bool | None
    replays: bool | None

    @classmethod
    def from_config(cls, config) -> "RunSpec":
        """Returns the run that a [`QuantGRPOConfig`] describes."""
        sampler = EngineSpec.from_config(config)
        packs = config.pack_sequences
        return cls(
            training=Training.from_config(config),
            sampler=sampler,
            trls_sampler=config.vllm_mode if sampler is None and config.use_vllm else None,
            correction=config.is_correction,
            adapter=config.lora_sync if config.is_adapted else None,
            packs=False if packs is None and sampler is None else packs,
            replays=config.router_replay,
        )

    @property
    def source(self) -> str | None:
        """What samples: a key of [`ENGINES`], also where TRL drives vLLM; `None` if the policy itself samples."""
        return self.trls_sampler if self.sampler is None else self.sampler.kind

    @property
    def has_sampler(self) -> bool:
        """Whether anything but the policy itself samples, so that log-probabilities of the two may differ."""
        return self.source is not None

    @property
    def sampled_in(self) -> str | None:
        """The precision of the engine that samples, a key of [`~precisions.PRECISIONS`]; `None` if TRL generates."""
        return None if self.sampler is None else self.sampler.precision

    @property
    def samples_as_trained(self) -> bool:
        """Whether an engine samples in the precision that the policy computes in."""
        return self.sampler is not None and self.sampler.precision == self.training.precision
