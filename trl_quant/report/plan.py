"""Plans a run before anything is loaded: makes its checks, and describes its engine, steps, memory and cost.

    trl-quant plan Qwen/Qwen2.5-7B-Instruct --rollout_precision fp8 --use_vllm true --use_peft true
    trl-quant train ... --dry_run true

Only the model's config and tokenizer are read. The model is built on the meta device, where weights take no memory.
"""

import math
import os
from dataclasses import dataclass

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig

from ..config.before_loading import check_before_loading
from ..config.checks import check_what
from ..config.fields import QuantFields
from ..config.given import Given, read_policy, read_processing_class
from ..config.lengths import context_of, measured
from ..config.summary import summary
from ..models.positions import switching
from ..policy.frozen import on_frozen_base
from ..precisions import bitsandbytes_bases
from ..storage.source import skeleton
from .cures import Planned, cures
from .measured import cost
from .memory import BESIDE, Memory, Shape, cache_of, completions_in_flight


GB = 10**9
CARD = 80 * GB  # memory of the GPU, if this machine has none


@dataclass(frozen=True)
class Plan:
    """
    The plan of a run.

    Attributes:
        lines (`list[str]`): The plan in words, to be printed.
        memory ([`~report.memory.Memory`] or `None`):
            The estimated memory; `None` if the weights are sharded, in bitsandbytes, or with a teacher or a critic.
        steps (`int`): Optimizer steps.
        refused (`Exception` or `None`): The reason why this machine cannot start the run.
        fits (`bool`): Whether the estimated memory is there; also `True` where it is not estimated.
    """

    lines: list[str]
    memory: Memory | None
    steps: int
    refused: Exception | None
    fits: bool = True


def make_plan(
    model: str,
    args: QuantFields,
    peft_config: PeftConfig | None,
    train_dataset: Dataset,
    card: int | None = None,
    on_cpu: bool | None = None,
    **others,
) -> Plan:
    """
    Plans a run.

    Args:
        model (`str`): A model's name or directory.
        args ([`~config.fields.QuantFields`]): The run's settings, such as a [`QuantGRPOConfig`].
        peft_config ([`~peft.PeftConfig`] or `None`): The adapter.
        train_dataset (`datasets.Dataset`): The prompts.
        card (`int`, *optional*): Bytes of the GPU; by default this machine's, or 80 GB. With a CPU, of its memory.
        on_cpu (`bool`, *optional*): Whether a CPU trains; by default whether `args` say so.
        others: The trainer's other arguments: `reward_funcs` or `teacher_model`, `eval_dataset`, `quantization_config`.

    Returns:
        [`Plan`]: The plan.

    Raises:
        `ValueError` or `ImportError`: for options that the trainer would refuse on any machine, and for a stream.
    """
    if isinstance(train_dataset, IterableDataset):
        raise ValueError(
            "`train_dataset` is a stream, of which a plan cannot know the longest prompt. Plan with some of its rows, "
            "such as `Dataset.from_list(list(train_dataset.take(1000)))`."
        )
    args.resolve_for(adapted=peft_config is not None)
    on_cpu = args.use_cpu if on_cpu is None else on_cpu
    refused = None
    try:
        check_what("machine", Given(args))
    except (ImportError, ValueError) as error:
        refused = error
    given = {"processing_class": None, "tools": None, "rollout_func": None, "environment_factory": None}
    given |= {"eval_dataset": None, "quantization_config": None} | others
    try:
        check_before_loading(
            model=model, args=args, train_dataset=train_dataset, peft_config=peft_config, here=refused is None, **given
        )
    except (ConnectionError, ImportError) as error:  # of the vLLM server or of attention, the last checks
        refused = error
    if args.spec.training.freezes_base:  # as the trainer does before it loads the base
        on_frozen_base(
            args=args, model=model, quantization_config=given["quantization_config"], peft_config=peft_config
        )

    init = args.model_init_kwargs or {}
    config = read_policy(model, args)
    processing_class = given["processing_class"]
    if processing_class is None:
        processing_class = read_processing_class(model, args)
    dtype = _dtype(init.get("dtype", "float32"), config)
    shape = Shape.of(config, peft_config)
    lengths = measured("train_dataset", train_dataset, processing_class, template=args.chat_template_kwargs)
    prompt = lengths.longest
    total = number_of_steps(args, len(train_dataset))

    adapted = f", and an adapter of {shape.adapter / 1e6:.1f} million" if shape.adapter else ""
    active = f", {shape.active / 1e9:.2f} of which compute a token" if shape.per_token else ""
    lines = [
        f"{summary(args, peft_config is not None, dtype, on_cpu)}.",
        f"Model: {model}, {shape.parameters / 1e9:.2f} billion parameters{active}{adapted}, loaded in {dtype}".replace(
            "torch.", ""
        ),
        f"Steps: {total}, from {len(train_dataset)} prompts. {_samples_of(args)}, with at most {prompt} + "
        f"{'any number of' if args.max_completion_length is None else args.max_completion_length} tokens "
        f"({lengths.source} were measured)",
    ]
    lines += _position_lines(args, config, prompt)
    memory, prompts_once = None, args.pack_sequences is not False
    if args.fsdp_version is not None or args.deepspeed_plugin is not None:
        lines.append("Memory: not estimated where FSDP or DeepSpeed shards the weights")
    elif not shape.is_counted:
        lines.append("Memory: not estimated for a model with other layers than `nn.Linear` and experts that are known")
    elif args.is_asynchronous:
        lines.append("Memory: not estimated for a trainer that samples while it trains")
    elif args.max_completion_length is None:
        lines.append("Memory: not estimated without a `max_completion_length`")
    elif given["quantization_config"] is not None or args.train_precision in bitsandbytes_bases():
        lines.append("Memory: not estimated with a base that bitsandbytes holds")
    elif args.has_critic or not args.has_rewards:
        lines.append(f"Memory: not estimated with a {'critic' if args.has_critic else 'teacher'}")
    else:
        place, card = _card(card, on_cpu)
        policy = skeleton(config, args.trust_remote_code)
        planned = Planned(args, policy, processing_class, shape, dtype, prompt, card, on_cpu)
        memory, prompts_once = planned.memory(), planned.prompts_once
        lines += _memory_lines(memory, place, card)
        if shape.experts:
            lines.append(f"  experts   counted for {shape.per_token} a token in `work`, which no run has measured")
        if shape.state:
            lines.append("  states    counted in `cache`. Their backward pass is not in `work`: no run has measured it")
        lines += in_flight_lines(args, shape, prompt, card)
        if memory.card > card:
            lines += ["It would fit with one of these changes:", *(f"  {line}" for line in cures(planned))]
    lines.append(f"Cost against BF16: {cost(args, shape, dtype, prompts_once)}")
    lines.append("This machine: " + ("no obstacle found" if refused is None else f"it cannot. {refused}"))
    return Plan(lines, memory, total, refused, memory is None or memory.card <= card)


def number_of_steps(args: QuantFields, prompts: int) -> int:
    """
    Returns the number of optimizer steps of a run over so many prompts. For a trainer that samples while it trains that
    is the number if no sample is dropped.
    """
    if args.max_steps > 0:
        return args.max_steps
    if args.is_asynchronous:  # an epoch is so many trained groups
        groups = math.ceil(args.num_train_epochs * prompts)
        return math.ceil(groups * args.num_generations / _samples_of_update(args))
    generations = prompts // (args.generation_batch_size // args.num_generations)  # an incomplete batch is dropped
    micro_batches = generations * args.steps_per_generation * args.num_iterations
    return math.ceil(args.num_train_epochs * max(math.ceil(micro_batches / args.gradient_accumulation_steps), 1))


def _samples_of_update(args) -> int:
    """Returns the number of completions that an optimizer step trains on."""
    return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps


def _samples_of(args) -> str:
    """Says how many completions are sampled together, or, where nothing is, how many are trained on together."""
    if args.is_asynchronous:
        by_length = "" if args.token_budget == 0 else ", or as many as fill rows of `token_budget` tokens"
        return f"An update has {_samples_of_update(args)} completions{by_length}"
    prompts = args.generation_batch_size // args.num_generations
    return f"A generation has {args.generation_batch_size} completions of {prompts} prompts"


def _dtype(given, config) -> torch.dtype:
    """Returns the type in which TRL loads a model: the given `dtype`, or the checkpoint's own for "auto"."""
    if given in ("auto", None):
        given = config.dtype or torch.float32
    return getattr(torch, given) if isinstance(given, str) else given


def _position_lines(args, config, prompt: int) -> list[str]:
    """Says which positions the run takes, if the model has others for long rows."""
    found = switching(config)
    if found is None or args.spec.sampler is None:
        return []
    if args.use_vllm and args.vllm_mode == "server":
        return [f"Positions: the model has {found}. The server's context decides which the run takes"]
    context = prompt + (args.max_completion_length or 0)
    if args.use_vllm:
        context = context_of(args, config).tokens
    kind = "longer" if context > found.limit else "not"
    return [f"Positions: the model has {found}. The run's rows have up to {context} tokens: each is one that is {kind}"]


def in_flight_lines(args, shape: Shape, prompt: int, card: int) -> list[str]:
    """Says what partial rollouts keep in flight, and whether vLLM's cache holds it."""
    if args.rollouts_in_flight == 1:
        return []
    line = f"In flight: {completions_in_flight(args)} completions of a GPU when a generation starts"
    if args.spec.source != "colocate":
        return [line]
    needed, room = cache_of(args, shape, prompt, card)
    line += f". At their longest they need {needed / GB:.2f} GB of vLLM's cache, which has {room / GB:.2f}"
    if needed > room:
        line += (
            ": some may wait in vLLM's queue. Raise `vllm_gpu_memory_utilization`, lower `rollouts_in_flight`, or keep "
            "keys and values in FP8 (`vllm_engine_kwargs={'kv_cache_dtype': 'fp8'}`)"
        )
    return [line]


def _card(card: int | None, on_cpu: bool) -> tuple[str, int]:
    """Returns what trains, in words, and the bytes of its memory; `card` if they are given."""
    if on_cpu:
        return "a CPU", memory_of_machine() if card is None else card
    if card is None and torch.cuda.is_available():
        card = torch.cuda.mem_get_info()[1]
    return ("a GPU", card) if card is not None else ("a GPU (there is none here; `--card` says another)", CARD)


def memory_of_machine() -> int:
    """Returns the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_lines(memory: Memory, place: str, card: int) -> list[str]:
    """Describes the memory by part."""
    lines = [f"Memory of {place} with {card / GB:.4g} GB, estimated, in GB:"]
    for heading, parts in (("held", memory.held), ("training", memory.training), ("sampling", memory.sampling)):
        sizes = [f"{name} {size / GB:.2f}" for name, size in parts.items() if size]
        if sizes:
            lines.append(f"  {heading:<10}{', '.join(sizes)}")
    lines.append(f"  {'beside':<10}{BESIDE / GB:.2f}: CUDA and libraries")
    fits = "fits" if memory.card <= card else "does not fit"
    lines.append(f"  {'peak':<10}{memory.card / GB:.2f}: {fits}")
    return lines
