"""Loads a run's policy, or a model, and builds the engine with which a run of the same settings samples."""

import ast
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import PeftConfig, PeftModel
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from .. import rollout
from ..config.checks.vllm import check_engine_kwargs
from ..config.lengths import model_context
from ..models.families import number_of_experts
from ..models.positions import LONGROPE, switching, why_vllm_differs
from ..policy.adapters import with_frozen_layers
from ..policy.frozen import freeze, packed_while_loading
from ..policy.masked import check_bidirectional, is_bidirectional
from ..policy.positions import fix_positions
from ..policy.unified import checkpoint_dtype, unify
from ..precisions import bitsandbytes_bases, frozen_bases, in_vllm, qat_precisions, train_precisions
from ..reading import reading
from ..rollout.sampling_options import BOTH, acts
from ..rollout.vllm.support import check_device, check_experts_here
from ..run_spec import EngineSpec, default_lora_sync, engine_kind
from ..storage.adapter import tell_others
from ..storage.identity import MODEL_FILES, tell_changed
from ..storage.manifest import check_read
from ..storage.named import check_named
from ..storage.quantization import gathered_dtype, prepared_precisions
from ..storage.run_checkpoints import how_to_go_on, last_complete_checkpoint, read_rollout_state
from ..storage.source import load_whole


logger = logging.getLogger(__name__)

BF16 = "bf16"
FORWARD_TYPES = {"mixed": torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORWARD_TYPES |= {"mixed_bfloat16": torch.bfloat16}  # TRL's autocast over weights that are in BF16 already
# Sampling option -> whether a value is allowed, and the words for it
RANGES = {
    "temperature": (lambda value: value > 0, "> 0"),
    "top_p": (lambda value: 0 < value <= 1, "> 0 and <= 1"),
    "top_k": (lambda value: value >= 0, ">= 0; 0 for all tokens"),
    "min_p": (lambda value: 0 <= value <= 1, ">= 0 and <= 1"),
    "repetition_penalty": (lambda value: value > 0, "> 0"),
}
MODES = {"embedded": "embedded", "vllm": "colocate"}  # `--engine` -> what samples, as in `run_spec.engine_kind`


@dataclass
class EngineOptions:
    """
    Options for the engine and the policy, under the names that they have on the command line. `None` stands for the
    run's own value, or the command's default where the model is no run ([`~report.run_settings.take`]).

    Attributes:
        rollout_precision (`str` or `None`): The engine's precision.
        train_precision (`str` or `None`): The policy's precision.
        engine (`str` or `None`): Key of `MODES`.
        vllm_engine_kwargs (`str` or `None`): Further arguments of vLLM's `LLM`, a JSON object.
        vllm_gpu_memory_utilization (`float`): Share of the GPU's memory for vLLM.
        dtype (`str` or `None`): Key of `FORWARD_TYPES`: types of the trainer's forward pass.
        trust_remote_code (`bool`): Whether the model's own Python may run.
        max_completion_length (`int` or `None`): Largest number of tokens of a completion.
        temperature, top_p, min_p, repetition_penalty (`float` or `None`), top_k (`int` or `None`): Of sampling.
        generation_kwargs (`str` or `None`): Further sampling options, a JSON object.
    """

    rollout_precision: str | None
    train_precision: str | None
    engine: str | None
    vllm_engine_kwargs: str | None
    vllm_gpu_memory_utilization: float
    dtype: str | None
    trust_remote_code: bool
    max_completion_length: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    generation_kwargs: str | None


@dataclass(frozen=True)
class Trained:
    """
    A model, or the newest complete checkpoint of a run.

    Attributes:
        path (`str`): Its directory, or its id on the hub.
        base (`str`): Directory or id of the model's weights: `path`, or for an adapter its base.
        adapter (`bool`): Whether it is an adapter instead of a whole model.
        revision (`str` or `None`): Branch, tag or commit of an adapter's base on the hub.
        settings (`dict`):
            The settings of the run, of TRL and of the data, as the checkpoint records them; `dtype` is that of the
            policy's weights.
        trust (`bool`): Whether the model's own Python may run.
        denoises (`bool`): Whether it is a masked diffusion model.
        prepared (`bool`): Whether the base is a checkpoint of the run's precision that `trl-quant prepare` wrote.
        has_experts (`bool`): Whether it is a mixture of experts.
        context (`int` or `None`): Tokens for which the run fixed its positions ([`~policy.positions`]), if it did.
    """

    path: str
    base: str
    adapter: bool
    revision: str | None
    settings: dict
    trust: bool
    denoises: bool
    prepared: bool
    has_experts: bool
    context: int | None = None

    @classmethod
    def find(cls, name: str, option: str = "`--mismatch`", trust: bool = False) -> "Trained":
        """
        Finds the model or run called `name`, which the user gave as `option`.

        Raises:
            ValueError: There is no such model, the directory holds no model and no adapter, the model is quantized
                already and is not the base that a run froze, or it is a masked diffusion model of an unknown family.
        """
        path, base, adapter, revision, settings, context = name, name, False, None, {}, None
        if Path(name).is_dir():
            path = base = last_complete_checkpoint(name) or name
            check_read(path, MODEL_FILES, f"{option}={name!r}")
            tell_changed(path)
            state = read_rollout_state(path)
            settings = state.get("arguments", {}) | state.get("settings", {})
            context = state.get("context")
            settings = {key: None if value == "None" else value for key, value in settings.items()}  # as recorded
            if "dtype" in state:
                settings["dtype"] = state["dtype"]
            adapter = (Path(path) / "adapter_config.json").is_file()
            if adapter:
                with reading(Path(path) / "adapter_config.json"):
                    config = PeftConfig.from_pretrained(path)
                tell_others(Path(path))
                base = config.base_model_name_or_path
                if not base:
                    raise ValueError(f"{option}={name!r}: the adapter_config.json in {path} does not name its base.")
                revision = None if Path(base).is_dir() else config.revision
            elif not (Path(path) / "config.json").is_file():
                raise ValueError(f"{option}={name!r} holds no model and no adapter. {how_to_go_on(name)}")
        named = option.strip("`") if base == path else f"base_model_name_or_path, of the adapter {path}"
        check_named(named, base, revision)
        try:
            with reading(base):
                config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            raise ValueError(f"{option}={name!r}: the config of {base!r} cannot be read. {error}") from error
        prepared = adapter and settings.get("train_precision") in (prepared_precisions(config) or ())
        if getattr(config, "quantization_config", None) is not None and not prepared:
            raise ValueError(f"{option}={name!r} is quantized already: {base}. Name a checkpoint of 16 or 32 bits.")
        denoises = is_bidirectional(config)
        if denoises:
            check_bidirectional(config)
        has_experts = number_of_experts(config.to_dict()) > 1
        return cls(path, base, adapter, revision, settings, trust, denoises, prepared, has_experts, context)

    @property
    def of_base(self) -> dict:
        """The arguments of `from_pretrained` for what is loaded from the base."""
        return {"revision": self.revision, "trust_remote_code": self.trust}

    @property
    def template_arguments(self) -> dict:
        """The run's `chat_template_kwargs`, which a checkpoint records as Python writes them."""
        return ast.literal_eval(self.settings.get("chat_template_kwargs") or "{}")

    def state(self) -> TrainerState:
        """Returns the trainer's state in the run's checkpoint; that of a new trainer if it has none, or is no run."""
        file = Path(self.path) / TRAINER_STATE_NAME
        if not self.settings or not file.is_file():
            return TrainerState()
        with reading(file):
            return TrainerState.load_from_json(str(file))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        own = (Path(self.path) / "tokenizer_config.json").is_file()
        place, options = (self.path, {"trust_remote_code": self.trust}) if own else (self.base, self.of_base)
        with reading(place):
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def policy(self, precision: str, dtype: torch.dtype, merged: bool):
        """
        Loads the model as a run trains it in `precision`. `merged` says whether the run's engine quantizes the sum of
        base and adapter.
        """
        packing, config = {}, {}
        if self.prepared:
            packed, config = packed_while_loading(self.base, precision, "train_precision", self.trust, self.revision)
            packing = {"quantization_config": packed}
        model = load_whole(self.base, self.of_base, dtype=dtype, **packing, **config)
        for_four_bits = precision in qat_precisions() and not self.adapter  # all weights, as saved
        frozen = self.prepared or (precision in frozen_bases() and not for_four_bits)
        if frozen:
            freeze(model, precision, checkpoint_dtype(self.base, self.trust))
        if self.adapter:
            with reading(self.path):
                config = PeftConfig.from_pretrained(self.path)
                config = with_frozen_layers(config) if frozen else config
                model = PeftModel.from_pretrained(model, self.path, config=config)
        if precision != BF16 and not frozen:
            rounds_to = None if merged else checkpoint_dtype(self.base, self.trust)
            if for_four_bits:
                rounds_to = gathered_dtype(model.config.to_dict()) or checkpoint_dtype(self.base, self.trust)
            unify(model, precision, merged, rounds_to)
        return model.eval()


def check_sampling(options: EngineOptions, instead: str = "") -> None:
    """Raises `ValueError` for a sampling option out of its range. `instead` follows the temperature's range."""
    for name, (is_allowed, allowed) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not is_allowed(value):
            told = allowed + (instead if name == "temperature" else "")
            raise ValueError(f"`--{name}`={value:g} is out of range. It must be {told}.")


def _json_object(options: EngineOptions, name: str) -> dict:
    """Parses an option that is a JSON object."""
    given = getattr(options, name)
    try:
        return dict(json.loads(given))
    except (ValueError, TypeError) as error:
        raise ValueError(f"`--{name}`={given!r} is not a JSON object: {error}.") from error


def resolve_engine(options: EngineOptions, trained: Trained) -> dict:
    """Checks that the options, which are filled in, fit together, and returns vLLM's arguments."""
    if trained.prepared and options.train_precision != trained.settings["train_precision"]:
        raise ValueError(
            f"`--train_precision`={options.train_precision!r}, but the run's base {trained.base} holds its weights "
            f"only in {trained.settings['train_precision']!r}. Leave it out."
        )
    if not 0 < options.vllm_gpu_memory_utilization <= 1:
        share = options.vllm_gpu_memory_utilization
        raise ValueError(f"`--vllm_gpu_memory_utilization`={share:g} is out of range. It must be > 0 and <= 1.")
    if options.train_precision in bitsandbytes_bases():
        allowed = [BF16, *(name for name in train_precisions() if name not in bitsandbytes_bases())]
        raise ValueError(
            f"`--train_precision`={options.train_precision!r} is bitsandbytes', which is not read here yet. Allowed: "
            f"{', '.join(map(repr, allowed))}."
        )
    kwargs = _json_object(options, "vllm_engine_kwargs")
    _json_object(options, "generation_kwargs")
    if options.engine == "vllm":
        precision = options.rollout_precision
        if precision not in in_vllm():
            raise ValueError(
                f"`--rollout_precision`={precision!r} does not run in vLLM. Allowed: "
                f"{', '.join(map(repr, in_vllm()))}; or `--engine embedded`."
            )
        check_device(precision, otherwise="--engine embedded")
        if trained.has_experts:
            check_experts_here(precision, otherwise="--engine embedded")
        check_engine_kwargs(kwargs)
    elif kwargs:
        raise ValueError("`--vllm_engine_kwargs` acts only with `--engine vllm`. Give both, or leave it out.")
    return kwargs


def check_length(options: EngineOptions, trained: Trained, longest_prompt: int) -> list[str]:
    """
    Returns a line to print if completions may be longer than those for which the model has positions; or none.

    Raises:
        ValueError: They may, and the engine computes no other positions.
    """
    with reading(trained.base):
        config = AutoConfig.from_pretrained(trained.base, **trained.of_base)
    context = model_context(config, options.engine == "vllm")
    needed = longest_prompt + options.max_completion_length + 1  # as the engine is built
    if context is None or needed <= context.tokens:
        return []
    message = (
        f"`--max_completion_length`={options.max_completion_length} is too long: the longest prompt has "
        f"{longest_prompt} tokens, and {context.field}={context.tokens}."
    )
    if context.ends:
        raise ValueError(message)
    return [f"{message} Completions may reach positions for which the model was not trained."]


def context_like(trained: Trained, config, needed: int) -> int:
    """
    Returns the context, at least the `needed` tokens, with which a policy computes the positions that its run fixed.
    """
    found = switching(config)
    if found is None or trained.context is None:
        return needed
    if trained.context <= found.limit < needed:
        logger.warning(
            "The policy has %s, and its run was not trained for longer rows. Up to %d tokens are needed here, so its "
            "positions differ from the run's. Give a smaller `--max_completion_length`.",
            found,
            needed,
        )
    if found.rope_type in LONGROPE:  # any context beyond the limit means the same, and vLLM holds keys for all of it
        return max(needed, min(trained.context, found.limit + 1))
    return max(needed, trained.context)


def build_engine(
    options: EngineOptions,
    trained: Trained,
    tokenizer: PreTrainedTokenizerBase,
    longest_prompt: int,
    num_sequences: int,
    kwargs: dict,
    schedule: dict | None = None,
) -> rollout.RolloutEngine:
    """
    Builds the engine of a run with these settings, and syncs the policy's weights to it.

    Args:
        options ([`EngineOptions`]): The options, filled in and checked by [`resolve_engine`].
        trained ([`Trained`]): The model or run whose policy samples.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The policy's tokenizer.
        longest_prompt (`int`): Tokens of the longest prompt.
        num_sequences (`int`): Number of sequences that vLLM may sample at a time.
        kwargs (`dict`): Further arguments of vLLM's `LLM`.
        schedule (`dict`, *optional*): How a masked diffusion model is denoised: fields of [`EngineSpec`].
    """
    train_precision = None if options.train_precision == BF16 else options.train_precision
    mode = MODES[options.engine]
    default = default_lora_sync(mode, options.rollout_precision, train_precision)
    lora_sync = trained.settings.get("lora_sync") or default
    policy = trained.policy(options.train_precision, FORWARD_TYPES[options.dtype], lora_sync == "merge")
    mixed = BF16 if options.dtype.startswith("mixed") else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed)
    given = {"temperature": options.temperature, "max_completion_length": options.max_completion_length}
    given |= {name: getattr(options, name) for name in BOTH if acts(getattr(options, name), BOTH[name])}
    generation_kwargs = _json_object(options, "generation_kwargs")
    if generation_kwargs:
        given["generation_kwargs"] = generation_kwargs
    given["trust_remote_code"] = trained.trust
    longest = context_like(trained, policy.config, longest_prompt + options.max_completion_length + 1)
    if options.engine == "vllm":
        why_not = why_vllm_differs(policy.config, longest)
        if why_not is not None:
            raise ValueError(f"`--engine vllm`: {why_not}. Give `--engine embedded`.")
        given |= {
            "max_model_length": longest,
            "max_num_seqs": num_sequences,
            "gpu_memory_utilization": options.vllm_gpu_memory_utilization,
        }
    spec = EngineSpec(
        kind=engine_kind(mode, options.rollout_precision, train_precision, denoises=trained.denoises),
        precision=options.rollout_precision,
        engine_kwargs=kwargs,
        lora_sync=lora_sync if trained.adapter else EngineSpec.lora_sync,
        cache_implementation=trained.settings.get("cache_implementation"),
        **(schedule or {}),
    )
    fix_positions(policy, longest)
    engine = rollout.build_engine(spec, policy.to(accelerator.device), accelerator, tokenizer, **given)
    engine.sync()
    return engine
