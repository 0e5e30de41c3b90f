"""
Ties a checkpoint to what its run was made of, beside its settings: models, adapters, tokenizer, data and ranks.

[`RunRecord`] writes the manifest (see [`~storage.manifest`]) when the files of all ranks are there, and before the
trainer state, which marks a checkpoint as whole. A run that resumes compares.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..config.places import CRITIC_START, models_read
from ..storage.adapter import active_adapters
from ..storage.identity import MODEL_FILES, POLICY, Identities, difference
from ..storage.manifest import Checksums, described, names_in, run_of, write_manifest
from ..storage.run_checkpoints import GENERATION_NAME
from ..trl_seams import exchanged
from .agreement import on_every_rank


logger = logging.getLogger(__name__)

ROWS_COMPARED = 1000  # of the data that are compared


class RunRecord:
    """
    The identity of one trainer's run.

    Args:
        args: The run's config.
        given: The trainer's arguments, before it loads the models among them.
    """

    def __init__(self, args, **given):
        self.identities = Identities(models_read(args=args, **given))
        self.run: dict = {}
        self.of_ranks: Checksums = {}

    def begin(self, trainer: Trainer, checkpoint: str | None) -> None:
        """
        Begins a training. Compares what the run is made of with the record of the checkpoint that it resumes from, and
        logs what may change the result. All ranks must call it.

        Raises:
            `ValueError`: A model, the tokenizer or the active adapters are not those of the checkpoint's run, without
            `resume_with_changes`.
        """
        self.run = {
            "adapters": active_adapters(trainer.model),
            "tokenizer": _tokenizer(trainer.processing_class),
            "data": _data(trainer.train_dataset),
        }
        before = None
        with on_every_rank():
            if checkpoint is not None:
                before = run_of(checkpoint)
            if before is not None and trainer.args.local_process_index == 0:
                self._compare(trainer, checkpoint, before)
        if trainer.args.process_index == 0:
            if checkpoint is not None and before is None:
                logger.warning(
                    "The checkpoint %s has no manifest.json, because an older version saved it: whether its files, and "
                    "the models that the run reads, are as they were cannot be checked.",
                    checkpoint,
                )
            self.identities.begin((before or {}).get("models", {}))

    def _compare(self, trainer: Trainer, checkpoint: str, before: dict) -> None:
        acting, others = [], []
        adapted = is_peft_model(trainer.model)
        for role, model in self.identities.found.items():
            old = before["models"].get(role)
            found = old and difference(old, model)
            if found:
                replaced = role == CRITIC_START or (role == POLICY and not adapted and not trainer.args.needs_reference)
                (others if replaced else acting).append(f"{role}: {found}")
        for name in ("adapters", "tokenizer", "data"):
            if before[name] != self.run[name]:
                (others if name == "data" else acting).append(f"{name}: {before[name]} -> {self.run[name]}")
        processes = before["ranks"]["processes"]
        if processes != trainer.args.world_size:
            others.append(f"ranks: {processes} -> {trainer.args.world_size}")
        if acting and not trainer.args.resume_with_changes:
            raise ValueError(
                f"The checkpoint {checkpoint} belongs to a run with other models or tokens than this run reads: "
                f"{'; '.join(acting)}. Restore them, or set `resume_with_changes=True`."
            )
        if acting or others:
            logger.warning("Resuming %s with changes: %s.", checkpoint, "; ".join(acting + others))

    def gather(self, trainer: Trainer, checkpoint: str) -> None:
        """Takes the checksums of the files that each rank has written by itself. All ranks must call it."""
        rank = trainer.args.process_index
        own = ["rng_state.pth" if trainer.args.world_size == 1 else f"rng_state_{rank}.pth"]
        own.append(f"{GENERATION_NAME}{rank}.pt")
        written = described(checkpoint, [name for name in own if Path(checkpoint, name).is_file()])
        self.of_ranks = {name: entry for files in gather_object([written]) for name, entry in files.items()}

    @contextmanager
    def finishing(self, trainer: Trainer) -> Iterator[None]:
        """Context in which transformers, when it writes the trainer state, writes the manifest first."""
        with exchanged(trainer.state, save_to_json=partial(self._finish, trainer)):
            yield

    def _finish(self, trainer: Trainer, json_path: str) -> None:
        checkpoint, begun = Path(json_path).parent, Path(f"{json_path}.begun")
        type(trainer.state).save_to_json(trainer.state, begun)
        here = described(checkpoint, names_in(checkpoint))
        elsewhere = sorted(self.of_ranks.keys() - here.keys())
        files = here | self.of_ranks
        files[TRAINER_STATE_NAME] = files.pop(begun.name)
        write_manifest(checkpoint, files, self.contents(trainer, elsewhere))
        os.replace(begun, json_path)

    def write_beside(self, trainer: Trainer, directory: str) -> None:
        """Writes the manifest of a model that is saved without the rest of a checkpoint."""
        names = [name for name in names_in(directory, MODEL_FILES) if not name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")]
        write_manifest(directory, described(directory, names), self.contents(trainer))

    def contents(self, trainer: Trainer, elsewhere: Sequence[str] = ()) -> dict:
        """Returns the run as the manifest tells it. Files of ranks that are `elsewhere` are on other hosts' disks."""
        ranks = {"processes": trainer.args.world_size, "elsewhere": [*elsewhere]}
        return self.run | {"models": self.identities.all(), "ranks": ranks}


def _tokenizer(processing_class) -> dict[str, str]:
    """Returns checksums of a tokenizer's tokens and of its chat template."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        tokens = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')[2]  # before: padding and truncation
    else:
        tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    template = json.dumps(getattr(processing_class, "chat_template", None), sort_keys=True)
    return {"tokens": _checksum(tokens), "chat_template": _checksum(template)}


def _data(dataset) -> dict:
    """Identifies data by the number of rows, and by a checksum of up to 1000 of them; a stream not at all."""
    if not isinstance(dataset, Dataset):
        return {}
    chosen = range(0, len(dataset), -(-len(dataset) // ROWS_COMPARED))
    rows = dataset.with_format("arrow")[list(chosen)].to_pylist()
    return {"rows": len(dataset), "columns": dataset.column_names, "checksum": _checksum(repr(rows))}


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
