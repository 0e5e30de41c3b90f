"""
Which model a name or a directory stands for, so that a checkpoint can tell whether it still does.

A model on the hub is identified by its commit. A directory is identified by a checksum of each file that the model is
made from. Reading all of them takes a share of the time in which the model loads, so that is done once, by a thread.
From then on size, times and header are compared, and whole files again only where those differ. So the same bytes are
the same model in any place.
"""

import logging
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..reading import reading
from .files import CODE, INDEX, ROLLOUT_STATE_NAME, TOKENIZER, WEIGHTS
from .manifest import checksums, run_of, signature


logger = logging.getLogger(__name__)

HEADER_BYTES = 1 << 16
# Files, other than weights, that decide what a model computes and samples
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", INDEX)
NO_MODEL = ("training_args.bin",)
# Files of a checkpoint that are read with its model
MODEL_FILES = (*WEIGHTS, *CONFIGS, *TOKENIZER, CODE, ROLLOUT_STATE_NAME)

POLICY = "the policy"  # the role of the model that a run trains, or of its adapter's base
Identity = dict  # as JSON: `name` and `revision`, and `commit` or `files`


def identity(name: str, revision: str | None = None) -> Identity:
    """
    Identifies a model without reading more than the headers of its files.

    Returns:
        `dict`: Its `name` and `revision`; then the `commit` if it is on the hub (`None` if it was not downloaded yet),
        else for each file of the directory its `signature`, the checksum of its header and, once [`complete`] has read
        it, its own.
    """
    found = {"name": name, "revision": revision}
    if not Path(name).is_dir():
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
        except HFValidationError:  # a directory that is gone
            cached = None
        return found | {"commit": Path(cached).parent.name if isinstance(cached, str) else None}
    if Path(name).resolve().parent.name == "snapshots":  # of the hub's cache
        return found | {"commit": Path(name).resolve().name}
    return found | {"files": {file.name: _by_header(file) for file in _files(Path(name))}}


def _files(directory: Path) -> Iterator[Path]:
    for pattern in (*WEIGHTS, *CONFIGS, CODE):
        yield from sorted(file for file in directory.glob(pattern) if file.name not in NO_MODEL)


def _by_header(file: Path) -> dict:
    with reading(file), file.open("rb") as opened:
        return {"signature": signature(file), "header": f"{zlib.crc32(opened.read(HEADER_BYTES)):08x}"}


def complete(model: Identity, known: Identity | None = None) -> Identity:
    """
    Adds the checksums of whole files to a model's identity. Takes those of `known`, where a file's signature and header
    are the same, and reads the others.
    """
    if "files" not in model:
        return model
    before = (known or {}).get("files", {})
    files = {name: dict(entry) for name, entry in model["files"].items()}
    unread = {}
    for name, entry in files.items():
        saved = before.get(name, {})
        if all(saved.get(key) == entry[key] for key in ("signature", "header")) and "checksum" in saved:
            entry["checksum"] = saved["checksum"]
        else:
            unread[name] = Path(model["name"], name)
    for name, checksum in zip(unread, checksums(unread.values()), strict=True):
        files[name]["checksum"] = checksum
    return model | {"files": files}


def difference(before: Identity, model: Identity) -> str | None:
    """Returns how a model differs from the one identified `before`, with the file's name; `None` if it is the same."""
    if before.get("changed"):
        return f"{before['name']} was changed while the run before read it"
    if "commit" in before and "commit" in model:
        if before["commit"] == model["commit"] or None in (before["commit"], model["commit"]):
            return None  # one is not in the cache of this machine
        return f"{model['name']} is at commit {model['commit']}, and was at {before['commit']}"
    if "commit" in before or "commit" in model:
        return f"{model['name']} cannot be compared with {before['name']}, because only one of them is on the hub"
    now = complete(model, before)["files"]
    for name in {**before["files"], **now}:
        if name not in now:
            return f"{Path(model['name'], name)} is gone"
        if name not in before["files"]:
            return f"{Path(model['name'], name)} is new"
        if now[name]["checksum"] != before["files"][name]["checksum"]:
            return f"{Path(model['name'], name)} has other contents"
    return None


def tell_changed(checkpoint: str | Path, but: tuple[str, ...] = ()) -> None:
    """
    Warns if a model that the run of a checkpoint read is another one now. `but` names what need not be compared: what
    a model is to the run.
    """
    models = (run_of(checkpoint) or {}).get("models", {})
    for role, before in models.items():
        is_there = "files" not in before or Path(before["name"]).is_dir()
        if role in but or not is_there:
            continue
        found = difference(before, identity(before["name"], before["revision"]))
        if found is not None:
            logger.warning("%s belongs to a run that read another model (%s): %s.", checkpoint, role, found)


class Identities:
    """
    The identities of the models that a run loads. [`begin`] lets a thread read the files, so that a run need not wait
    for it before its first save.

    Args:
        models (`dict[str, tuple[str, str | None]]`): What a model is to the run -> its name and its revision.

    Attributes:
        found (`dict[str, Identity]`): The identities as they were before the models were loaded, without checksums of
            whole files.
    """

    def __init__(self, models: dict[str, tuple[str, str | None]]):
        self.models = models
        self.found = {role: identity(*source) for role, source in models.items()}
        self._complete: dict[str, Identity] = {}
        self._thread: threading.Thread | None = None

    @property
    def directories(self) -> list[str]:
        """The directories among the models."""
        return [name for name, _ in self.models.values() if Path(name).is_dir()]

    def begin(self, known: dict[str, Identity]) -> None:
        """Begins to read the files, except those that are as `known`, a checkpoint's record, says."""
        self._thread = threading.Thread(target=self._read, args=(known,), daemon=True)
        self._thread.start()

    def _read(self, known: dict[str, Identity]) -> None:
        for role, model in self.found.items():
            try:
                whole, now = complete(model, known.get(role)), identity(*self.models[role])
            except OSError:  # a file is gone
                whole, now = {}, {}
            if "files" not in model:
                whole = now  # a model on the hub has a commit once it is downloaded
            elif now != model:
                whole = {"name": model["name"], "revision": model["revision"], "changed": True}
            self._complete[role] = whole

    def all(self) -> dict[str, Identity]:
        """Returns the identities with the checksums of whole files. A model that was changed since is marked so."""
        if self._thread is None:  # a model is saved that was not trained
            self.begin({})
        self._thread.join()
        return self._complete
