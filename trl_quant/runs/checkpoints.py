"""Checkpoints of a training: saves the engine's state with them, and checks that a run may resume from one."""

import errno
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftConfig
from peft.utils.constants import MIN_TARGET_MODULES_FOR_OPTIMIZATION
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..policy.positions import fixed_context
from ..reading import ANOTHER, reading
from ..rollout.address import without_password
from ..storage.files import ROLLOUT_STATE_NAME
from ..storage.manifest import MANIFEST, damage
from ..storage.run_checkpoints import (
    GENERATION_NAME,
    checkpoints_in,
    has_whole_weights,
    how_to_go_on,
    is_whole,
    lacking,
    last_to_resume,
    number_of,
    read_rollout_state,
    read_state,
    runs_of,
    saved_only_model,
)
from ..storage.whole import is_full
from ..tasks.named_rewards import name_of
from .agreement import joined_answers, on_every_rank
from .own_directory import beside_another_run, check_place


logger = logging.getLogger(__name__)

OF_A_RANK = ("rng_state", GENERATION_NAME)  # prefixes of the files that each rank writes on its own host
FITTED = ("r", "lora_alpha", "use_rslora", "use_dora")  # if these differ, weights do not fit or act differently
COPY_IT = "Copy the newest whole one to every host, or have all hosts share `output_dir`."
# Earlier weights with which the engine compares the current ones. Each set is stored in a file of its own, and not as
# .safetensors, because vLLM loads every .safetensors file in a directory
SAMPLED_WEIGHTS = ("initial_weights", "synced_weights")


def new_run(before: list[str]) -> list[str]:
    """
    Returns the names of the runs that a new run continues, followed by a name for the new run. All ranks must call it.
    """
    return [*before, gather_object([uuid4().hex[:8]])[0]]


def _check_one_run(output_dir: str, found: list[Path]) -> None:
    """
    Raises `ValueError` if a directory holds checkpoints of runs that did not continue one another, because the
    checkpoint with the highest step may then belong to a run other than the one to resume.
    """
    runs = {path: runs_of(path) for path in found}
    steps_of_unknown_runs = [number_of(path) for path, names in runs.items() if not names]
    known = {path: names for path, names in runs.items() if names}
    line_of_runs = list(known.values())[-1] if known else []  # of the newest checkpoint whose run is known
    has_stranger = any(names[-1] not in line_of_runs for names in known.values())
    if steps_of_unknown_runs and known:  # checkpoints of older versions must come first
        has_stranger |= max(steps_of_unknown_runs) > min(map(number_of, known))
    if has_stranger:
        listed = ", ".join(f"{path.name} (run {names[-1] if names else 'unknown'})" for path, names in runs.items())
        raise ValueError(
            f"`resume_from_checkpoint`=True, but {output_dir} holds checkpoints of several runs: {listed}. Name the "
            f"one to resume from, as in `train(resume_from_checkpoint={os.fspath(found[0])!r})`, and give each run an "
            "`output_dir` of its own."
        )


def checkpoint_to_resume(output_dir: str) -> str:
    """
    Returns the newest checkpoint that is complete on every host. Each host looks in its own `output_dir`, which they
    may share. All ranks must call it.

    Raises:
        `ValueError`: There is no such checkpoint, or it may belong to another run. Raised on every rank.
    """
    mine = {path.name: lacking(path) for path in checkpoints_in(output_dir) if has_whole_weights(path)}
    found = gather_object([(platform.node(), mine)])
    common = [name for name in mine if all(name in parts and not parts[name] for _, parts in found)]
    refused, damaged = "`resume_from_checkpoint`=True, but", []
    while common:
        newest = os.path.join(output_dir, common[-1])
        fault = damage_on_a_host(newest)
        if fault is None:
            with on_every_rank():
                _check_one_run(output_dir, [Path(output_dir, name) for name in common])
            _tell_damaged(newest)
            return newest
        common.pop()
        damaged.append(fault)
    if damaged:
        raise ValueError(f"{refused} no checkpoint in {output_dir} is as it was saved: {' '.join(damaged)}")
    if not any(not lacks for _, parts in found for lacks in parts.values()):
        raise ValueError(f"{refused} there is nothing to resume. {how_to_go_on(output_dir)}")
    where = joined_answers([_what_a_host_has(host, parts) for host, parts in found])
    raise ValueError(f"{refused} no checkpoint in {output_dir} is whole on every host: {where}. {COPY_IT}")


def _tell_damaged(chosen: str) -> None:
    """Warns of the checkpoints after the one that a run resumes from that were saved whole, and are so no longer."""
    for path in checkpoints_in(os.path.dirname(chosen)):
        fault = damage(path) if number_of(path) > number_of(Path(chosen)) else None
        if fault is not None:
            logger.warning("%s The run resumes from %s.", fault, chosen)


def damage_on_a_host(checkpoint: str) -> str | None:
    """
    Returns what is wrong with a checkpoint's files on some host, or `None`. One rank of each host reads them. All ranks
    must call it.
    """
    reads = PartialState().is_local_main_process
    faults = gather_object([damage(checkpoint) if reads else None])
    return next(filter(None, faults), None)


def _what_a_host_has(host: str, lacking_parts: dict[str, list[str]]) -> str:
    """Describes a host's checkpoints, given the parts that each lacks to resume a run."""
    whole = [name for name, parts in lacking_parts.items() if not parts]
    others = [f"{name} lacks its {' and '.join(parts)}" for name, parts in lacking_parts.items() if parts]
    return f"{host} has {', '.join(whole) or 'none'}" + (f" ({', '.join(others)})" if others else "")


def start_of(args, peft_config) -> str | None:
    """
    Returns the checkpoint from which a command's run resumes, or `None`. Checks it, and `output_dir`, before a model is
    loaded. All ranks must call it.

    Raises:
        `ValueError`: There is nothing to resume; the settings or the adapter differ, as in [`check_settings`] and
        [`check_adapter`]; or a new run would save into a directory that cannot be written, or beside another run's
        checkpoints.
    """
    if not isinstance(args.resume_from_checkpoint, str | os.PathLike | bool | None):
        raise ValueError(
            f"`resume_from_checkpoint`={args.resume_from_checkpoint!r} must be the directory of a checkpoint, such as "
            f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-100, or True for the newest one in `output_dir`."
        )
    resume = {"true": True, "false": None}.get(str(args.resume_from_checkpoint).lower(), args.resume_from_checkpoint)
    if resume is True:
        resume = checkpoint_to_resume(args.output_dir)
    with on_every_rank():
        if args.should_save:
            check_place(args.output_dir)
        if resume:
            check_whole(resume)
            check_adapter(resume, peft_config)
            if not args.resume_with_changes:
                _check_same_settings(resume, read_rollout_state(resume), args)
            return resume
        beside = beside_another_run(args.output_dir)
        if beside is not None:
            raise ValueError(beside)


def check_whole(checkpoint: str) -> None:
    """Raises `ValueError` unless a directory to resume from is a complete checkpoint, with the files as saved."""
    path, whole = Path(checkpoint), is_whole(Path(checkpoint))
    own = None if whole else last_to_resume(checkpoint)
    if own is not None:
        raise ValueError(
            f"`resume_from_checkpoint`={checkpoint!r} is the directory of a run. Name a checkpoint, such as {own}."
        )
    fault = damage(checkpoint) if PartialState().is_local_main_process else None
    if fault is not None:
        raise ValueError(
            f"`resume_from_checkpoint`={checkpoint!r}: {fault} Name the checkpoint before it. If the file was changed "
            f"on purpose, delete {MANIFEST}."
        )
    if not whole:
        if not path.is_dir():
            wrong = "is not a directory"
        elif has_whole_weights(path):
            wrong = f"lacks its {' and '.join(lacking(path))}"
        else:
            wrong = "was not written to its end"
        raise ValueError(f"`resume_from_checkpoint`={checkpoint!r} {wrong}. {how_to_go_on(os.fspath(path.parent))}")
    with reading(path / TRAINER_STATE_NAME, advice=ANOTHER):
        TrainerState.load_from_json(path / TRAINER_STATE_NAME)  # as transformers will read it


def is_lost(error: BaseException) -> bool:
    """Whether an error comes from a collective operation that another rank did not complete."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def others_lost(trainer: Trainer) -> Iterator[None]:
    """Context in which a rank that loses another rank raises an error that says so, and how to resume the run."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        args, step = trainer.args, trainer.state.global_step
        raise RuntimeError(
            f"Rank {args.process_index} ({platform.node()}) lost another rank at step {step}: it ended, or did not "
            f"answer for `ddp_timeout`={args.ddp_timeout} seconds. Its own output says why. "
            f"{how_to_go_on(args.output_dir)} Cause: {error}"
        ) from error


@contextmanager
def engine_explained(trainer, engine) -> Iterator[None]:
    """Context in which an error of a trainer's engine also names the step, and the checkpoint to resume from."""
    try:
        yield
    except ValueError:  # its message already tells the user what to do
        raise
    except Exception as error:
        if is_lost(error):  # `others_lost` adds the explanation
            raise
        step, go_on = trainer.state.global_step, how_to_go_on(trainer.args.output_dir)
        broken = engine.weights.first_non_finite()
        why = f": the policy's `{broken}` holds NaN or infinity" if broken else ""
        message = f"The {engine.precision} rollout engine failed at step {step}{why}. {go_on} Cause: {error}"
        raise RuntimeError(message) from error


@contextmanager
def saving(checkpoint: str) -> Iterator[None]:
    """Context in which a full disk raises an error with the directory, the space left and how to resume the run."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        directory = Path(checkpoint).parent
        existing = next(place for place in Path(checkpoint).absolute().parents if place.is_dir())
        free = shutil.disk_usage(existing).free
        may_be_full = isinstance(error, RuntimeError) and free < 2**20  # torch.save does not tell the cause
        if not is_full(error) and not may_be_full:
            raise
        raise OSError(
            errno.ENOSPC,
            f"No space left while saving {checkpoint}: {free / 2**20:.1f} MiB are free in {directory}. Delete that "
            f"checkpoint and make room, or set `save_total_limit`. {how_to_go_on(str(directory))}",
        ) from error


def recorded(trainer: Trainer) -> dict:
    """
    Returns a checkpoint's record of its run: the settings that a resumed run must share, all arguments, the names of
    runs, the policy's data type, in which an adapter is merged into its base, and the context for which its positions
    were fixed. Among the arguments are the data, the rewards and the tools, by name.
    """
    arguments = {"model": getattr(trainer.model, "name_or_path", None)} | trainer.args.to_sanitized_dict()
    arguments |= trainer.data | {"reward_funcs": [name_of(reward) for reward in getattr(trainer, "reward_funcs", [])]}
    arguments["tools"] = [name_of(tool) for tool in getattr(trainer, "tools", [])]
    rollout_func = getattr(trainer, "rollout_func", None)
    arguments["rollout_func"] = None if rollout_func is None else name_of(rollout_func)
    if arguments.get("vllm_server_base_url"):
        arguments["vllm_server_base_url"] = without_password(arguments["vllm_server_base_url"])
    dtype = str(trainer.model.dtype).removeprefix("torch.")
    found = {"settings": _settings(trainer.args), "arguments": arguments, "runs": trainer.runs, "dtype": dtype}
    return found | {"context": fixed_context(trainer.model)}


def _settings(args) -> dict:
    """Returns a run's settings that a resume compares. Our class of its config tells one trainer from another."""
    package = __name__.partition(".")[0]
    kind = next(cls for cls in type(args).__mro__ if cls.__module__.partition(".")[0] == package)
    return args.training_settings() | {"config": kind.__name__}


def write_rollout_state(checkpoint: str | Path, state: dict) -> None:
    """Writes the state that the engine needs to resume. Must be called before the rest of the checkpoint is written."""
    Path(checkpoint).mkdir(parents=True, exist_ok=True)
    plain = {name: value for name, value in state.items() if name not in SAMPLED_WEIGHTS}
    (Path(checkpoint) / ROLLOUT_STATE_NAME).write_text(json.dumps(plain))
    for name in SAMPLED_WEIGHTS:
        if state.get(name):
            torch.save({key: tensor.cpu() for key, tensor in state[name].items()}, Path(checkpoint, f"{name}.pt"))


def read_sampled_weights(checkpoint: str | Path, name: str) -> dict[str, torch.Tensor] | None:
    """Reads one of [`SAMPLED_WEIGHTS`], or `None` if there is none. Raises `ValueError` for a damaged file."""
    path = Path(checkpoint, f"{name}.pt")
    if not path.is_file():
        return None
    with reading(path, advice=ANOTHER):
        return torch.load(path, map_location="cpu", weights_only=True)


def check_resume(checkpoint: str, args, uaq_scale: float | None) -> dict:
    """
    Checks that a run may resume from a checkpoint, and returns the state that its engine needs.

    Raises:
        `ValueError`: The checkpoint is incomplete, or was trained with other settings than this run's.
    """
    with on_every_rank():
        check_whole(checkpoint)
        check_uaq(checkpoint, uaq_scale)
        state = read_rollout_state(checkpoint)
        _check_same_settings(checkpoint, state, args)
        sampled = {name: read_sampled_weights(checkpoint, name) for name in SAMPLED_WEIGHTS}
    tell_changes(checkpoint, state.get("arguments", {}), args.inherited_settings())
    if saved_only_model(checkpoint):
        logger.warning(
            "%s was saved with `save_only_model`: optimizer, learning rate schedule%s and random state start again.",
            checkpoint,
            ", critic" if args.has_critic else "",
        )
    if args.sync_ref_model:
        logger.warning(
            "`sync_ref_model`: checkpoints hold no reference model. A run that resumes %s begins with the initial one.",
            checkpoint,
        )
    check_same_files(checkpoint)
    if sampled["initial_weights"] is None and sampled["synced_weights"] is not None:
        logger.warning(
            "The checkpoint %s has no initial_weights.pt, so the initial weights of its run are not known, and "
            "`weights/normalized_total_update` is not logged.",
            checkpoint,
        )
    return state | sampled


def _check_same_settings(checkpoint: str, state: dict, args) -> None:
    now = _settings(args)
    before = now | args.plain_settings() | state.get("settings", {})  # older checkpoints lack the newest fields
    check_settings(checkpoint, before, now, args.resume_with_changes)


def check_same_files(checkpoint: str | Path) -> None:
    """
    Raises `ValueError` if hosts that do not share a disk hold different files of a checkpoint. Under FSDP only rank 0
    saves the optimizer, and a host without that file would not take part in loading it, so the others would hang.
    """
    mine = {path.name for path in Path(checkpoint).iterdir() if not path.name.startswith(OF_A_RANK)}
    found = gather_object([(platform.node(), mine)])
    whole = set().union(*(names for _, names in found))
    answers = []
    for host, names in found:
        answers.append(None if names == whole else f"{host} lacks {', '.join(sorted(whole - names))}")
    faults = joined_answers(answers)
    if faults:
        raise ValueError(f"{checkpoint} is not the same on every host: {faults}. {COPY_IT}")


def check_settings(checkpoint: str | Path, before: dict, now: dict, changes_allowed: bool) -> None:
    """
    Raises `ValueError` if a checkpoint's run and this run differ in a setting that changes the result of training.

    Args:
        checkpoint (`str` or `Path`): The checkpoint, for the message.
        before, now (`dict`): Settings as [`~config.QuantGRPOConfig.training_settings`] returns them.
        changes_allowed (`bool`): Whether to log differences instead of raising.
    """
    differences = _differences({name: before.get(name) for name in now}, now)
    if not differences:
        return
    if not changes_allowed:
        raise ValueError(
            f"The checkpoint {checkpoint} was trained with other settings than this run has: {differences}. Resume "
            "with the same ones, or set `resume_with_changes=True`."
        )
    logger.warning("Resuming %s with changed settings: %s.", checkpoint, differences)


def tell_changes(checkpoint: str | Path, before: dict, now: dict) -> None:
    """Warns of settings of TRL and transformers that differ from those of the checkpoint's run."""
    differences = _differences(before, json.loads(json.dumps(now)))
    if differences:
        logger.warning("Resuming %s with other settings than it was trained with: %s.", checkpoint, differences)


def check_adapter(checkpoint: str | Path, adapter: PeftConfig | None) -> None:
    """Raises `ValueError` if a checkpoint's adapter is not the one that a run trains, or if only one has an adapter."""
    before = read_state(Path(checkpoint, "adapter_config.json"))
    if adapter is None and before:
        raise ValueError(
            f"The checkpoint {checkpoint} holds an adapter, and this run trains all weights. Resume with that "
            "adapter's `peft_config` (on the command line: `use_peft`)."
        )
    if adapter is not None and not before and Path(checkpoint, "config.json").is_file():
        raise ValueError(
            f"The checkpoint {checkpoint} holds a whole model, and this run trains an adapter. Resume without a "
            "`peft_config` (on the command line: `use_peft`)."
        )
    if adapter is None or not before:
        return
    now = {name: getattr(adapter, name) for name in FITTED if hasattr(adapter, name)}
    old, new = before.get("target_modules"), getattr(adapter, "target_modules", None)
    is_final = isinstance(new, set) and len(new) < MIN_TARGET_MODULES_FOR_OPTIMIZATION  # PEFT rewrites other values
    if is_final and isinstance(old, list):
        before, now = before | {"target_modules": sorted(old)}, now | {"target_modules": sorted(new)}
    differences = _differences(before, now)
    if differences:
        raise ValueError(
            f"The checkpoint {checkpoint} holds another adapter than this run trains: {differences}. Resume with the "
            "same one."
        )


def _differences(before: dict, now: dict) -> str:
    """Describes the settings in both that differ, in the order of `now`; empty if none does."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    return ", ".join(f"`{name}`: {before[name]!r} -> {now[name]!r}" for name in changed)


def check_uaq(checkpoint: str | Path, applied: float | None) -> None:
    """Raises `ValueError` if a checkpoint's UAQ factor differs from this run's (`applied`; `None` without UAQ)."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        return
    recorded_scale = read_state(path).get("uaq_scale")
    if recorded_scale != applied:
        raise ValueError(
            f"The checkpoint {checkpoint} was trained with `uaq_scale`={recorded_scale}, but this run has "
            f"`uaq_scale`={applied}. Resume with the same value."
        )


def same_after_resume(sampler: Sampler | None) -> Sampler | None:
    """
    Makes TRL's sampler shuffle each epoch of a resumed run as in an unbroken run. TRL's sampler draws a new order
    whenever it is iterated, so a run that resumes in a later epoch would begin with the first epoch's order.
    """
    if getattr(sampler, "shuffle", False) and getattr(sampler, "seed", None) is not None:
        sampler.set_epoch = partial(_set_epoch, sampler)
    return sampler


def _set_epoch(sampler: Sampler, epoch: int) -> None:
    sampler.generator.manual_seed(sampler.seed)
    for _ in range(epoch):
        torch.randperm(sampler.num_samples, generator=sampler.generator)
