"""Finds changes of a run with which its memory fits, by estimating the memory of the changed run.

Each change has one or more variants, from the mildest on. A change that is enough by itself is told with the mildest
variant that is enough. If none is, changes are combined.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from ..run_spec import default_lora_sync
from .memory import Memory, Shape, estimate, has_prompts_once


BASE = "nvfp4"  # precision of the frozen base that is proposed
RANK = 16  # of the LoRA that is proposed, TRL's default
GPUS = (2, 4, 8)
SHARED_BY_RANKS = ("policy", "codes", "adapter", "optimizer", "reference")  # the parts of a GPU that FSDP2 shards


@dataclass(frozen=True)
class Planned:
    """
    A run whose memory can be estimated.

    Attributes:
        args ([`~config.fields.QuantFields`]): Its settings, with a `max_completion_length`.
        policy ([`~transformers.PreTrainedModel`]): The model on the meta device, without the adapter.
        processing_class: Its tokenizer or processor.
        shape ([`~report.memory.Shape`]): The model's sizes, with the adapter's.
        dtype (`torch.dtype`): Type in which the policy is loaded.
        prompt (`int`): Tokens of the longest prompt.
        card (`int`): Bytes of the GPU, or of the machine whose CPU trains.
        on_cpu (`bool`): Whether a CPU trains.
        gpus (`int`): GPUs over which FSDP2 shards the trained model; 1 for none.
    """

    args: object
    policy: PreTrainedModel
    processing_class: object
    shape: Shape
    dtype: torch.dtype
    prompt: int
    card: int
    on_cpu: bool
    gpus: int = 1

    @property
    def prompts_once(self) -> bool:
        """Whether a prompt is computed once for its completions in a micro-batch."""
        return has_prompts_once(self.args, self.policy, self.processing_class)

    def memory(self) -> Memory:
        found = estimate(self.args, self.shape, self.dtype, self.prompt, self.card, self.prompts_once)
        if self.gpus == 1:
            return found
        held = {name: size // (self.gpus if name in SHARED_BY_RANKS else 1) for name, size in found.held.items()}
        whole_layer = self.dtype.itemsize * self.shape.linear // self.shape.layers  # gathered while it computes
        training = found.training | {"gradients": found.training["gradients"] // self.gpus, "layer": whole_layer}
        return Memory(held, training, found.sampling)

    @property
    def fits(self) -> bool:
        return self.memory().card <= self.card

    def having(self, **fields) -> "Planned":
        """Returns the run with other values of its settings."""
        return replace(self, args=self.args.having(**fields))


# Changes: from a run to its variants, each with its words


def in_bf16(run: Planned) -> Iterator[tuple[str, Planned]]:
    if run.dtype == torch.float32:
        yield "`dtype`='bfloat16'", replace(run, dtype=torch.bfloat16)


def checkpointing(run: Planned) -> Iterator[tuple[str, Planned]]:
    if not run.args.gradient_checkpointing:
        yield "`gradient_checkpointing`=True", run.having(gradient_checkpointing=True)


def asleep(run: Planned) -> Iterator[tuple[str, Planned]]:
    if run.args.spec.source == "colocate" and not run.on_cpu and not run.args.vllm_enable_sleep_mode:
        yield "`vllm_enable_sleep_mode`=True", run.having(vllm_enable_sleep_mode=True)


def smaller_share(run: Planned) -> Iterator[tuple[str, Planned]]:
    """vLLM's share must still hold its weights and the keys and values of one completion."""
    args = run.args
    if args.spec.source != "colocate" or "kv_cache_memory_bytes" in (args.vllm_engine_kwargs or {}):
        return
    one = 2 * run.shape.token * (run.prompt + args.max_completion_length)
    weights = _engine_bytes(run.having(vllm_gpu_memory_utilization=0.0))
    for percent in range(95, 0, -5):
        if percent / 100 < args.vllm_gpu_memory_utilization and percent / 100 * run.card >= weights + one:
            share = percent / 100
            yield f"`vllm_gpu_memory_utilization`={share:g}", run.having(vllm_gpu_memory_utilization=share)


def _engine_bytes(run: Planned) -> int:
    memory = run.memory()
    return memory.held.get("engine", 0) + memory.sampling.get("engine", 0)


def smaller_micro_batch(run: Planned) -> Iterator[tuple[str, Planned]]:
    args = run.args
    size = args.per_device_train_batch_size
    for smaller in (n for n in range(size - 1, 0, -1) if size % n == 0):
        times = size // smaller
        fields = {"per_device_train_batch_size": smaller}
        for name in ("gradient_accumulation_steps", "steps_per_generation"):
            fields[name] = getattr(args, name) * times
        told = f"`per_device_train_batch_size`={smaller} with `gradient_accumulation_steps`="
        yield told + str(fields["gradient_accumulation_steps"]), run.having(**fields)


def new_adapter(run: Planned) -> Iterator[tuple[str, Planned]]:
    if not run.shape.adapter and not run.args.spec.training.is_qat:
        shape = Shape.of(run.policy.config, LoraConfig(r=RANK, target_modules="all-linear"))
        yield f"`use_peft`=True (LoRA of rank {RANK})", replace(run.having(is_adapted=True), shape=shape)


def four_bit_base(run: Planned) -> Iterator[tuple[str, Planned]]:
    args = run.args
    if args.spec.training.freezes_base or not args.has_rewards or run.shape.experts:
        return
    told, changed = "", run
    for words, adapted in new_adapter(run):
        told, changed = f"{words} with ", adapted
    if not changed.shape.adapter:
        return
    fields, words = {"train_precision": BASE, "exact_rollouts": False}, f"`train_precision`='{BASE}'"
    if args.spec.sampler is not None:
        fields["rollout_precision"] = BASE
        words = f"`rollout_precision`='{BASE}' and {words}"
    mode = args.vllm_mode if args.use_vllm else "embedded"
    fields["lora_sync"] = default_lora_sync(mode, fields.get("rollout_precision"), BASE)
    yield told + words, changed.having(**fields)


def more_gpus(run: Planned) -> Iterator[tuple[str, Planned]]:
    if not run.on_cpu and not run.args.spec.training.freezes_base and run.args.world_size == 1:
        for gpus in GPUS:
            yield f"{gpus} GPUs with FSDP2 (`--fsdp full_shard`, `fsdp_version` 2)", replace(run, gpus=gpus)


CHANGES = (in_bf16, checkpointing, asleep, smaller_share, smaller_micro_batch, new_adapter, four_bit_base, more_gpus)


def cures(run: Planned) -> list[str]:
    """Returns a line for each change with which the run fits, or one line with a combination or without a cure."""
    alone = []
    for change in CHANGES:
        words = next(((told, changed) for told, changed in change(run) if changed.fits), None)
        if words is not None:
            alone.append(_line(*words))
    if alone:
        return alone
    on_one_gpu = [change for change in CHANGES if change is not more_gpus]
    needed = on_one_gpu if _combined(run, on_one_gpu)[1].fits else list(CHANGES)
    if not _combined(run, needed)[1].fits:
        peak = _gb(_combined(run, needed)[1])
        return [f"no change that is known here is enough: with all of them the peak is {peak} GB"]
    for change in list(needed):
        without = [other for other in needed if other is not change]
        if _combined(run, without)[1].fits:
            needed = without
    return [_line(*_combined(run, needed))]


def _combined(run: Planned, changes) -> tuple[str, Planned]:
    """Makes changes one after the other, each in its mildest variant that is enough, else in its strongest."""
    told = []
    for change in changes:
        variants = list(change(run))
        if not variants:
            continue
        words, changed = next((variant for variant in variants if variant[1].fits), variants[-1])
        if changed.memory().card < run.memory().card:
            told.append(words)
            run = changed
    return ", ".join(told), run


def _line(told: str, run: Planned) -> str:
    return f"{told}: peak {_gb(run)} GB"


def _gb(run: Planned) -> str:
    return f"{run.memory().card / 10**9:.2f}"
