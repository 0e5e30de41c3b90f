"""
Checkpoints on disk: reads the headers of safetensors files, and writes a changed copy in a way that can be resumed
after the process was killed.

The headers alone decide which tensors go into which file of the copy. Each file is computed independently of the others
and gets its final name only when it is complete, so a run that was killed continues with the first missing file. The
copy is written to `.NAME.part` beside the target, and renamed to the target as the last step.

Copies are often published, so only the source's own files are copied: an index or a link that leads out of the source's
directory is refused. A new run reuses only the weight files of an interrupted one, and only if its `run.json` holds the
same settings.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

import torch
from torch import Tensor

from ..reading import read_json, reading
from .lock import locked
from .manifest import MANIFEST, matches
from .whole import told_if_full, write_whole


logger = logging.getLogger(__name__)

# Files copied along with the weights, without data and pickles. `CODE` is copied only from a trusted checkpoint
FILES = ("*.json", "*.jinja", "*.md", "*.model", "*.tiktoken", "*.txt", "LICENSE", "NOTICE")
INDEX = "model.safetensors.index.json"
CODE = "*.py"
ROLLOUT_STATE_NAME = "rollout_state.json"  # of a run's checkpoint
SHARD_BYTES = 4 << 30
STATE = "run.json"
LOCK = "lock"
# Files whose tensors reach the copy
WEIGHTS = ("*.safetensors", "*.bin")
# Files of a tokenizer. A run saves them, because its tokenizer may differ from its base's
TOKENIZER = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")

Tensors = dict[str, Tensor]
Transform = Callable[[Tensors], Tensors]


class Stored(NamedTuple):
    """
    A tensor of a checkpoint, as the header of its file describes it.

    Attributes:
        file (`Path`): The file that holds it.
        shape (`tuple[int, ...]`): Its shape.
        floating (`bool`): Whether its data type is a floating-point type.
        nbytes (`int`): Its size in bytes.
    """

    file: Path
    shape: tuple[int, ...]
    floating: bool
    nbytes: int

    @property
    def like(self) -> Tensor:
        """A tensor on the meta device with the same shape, floating-point if this one is."""
        return torch.empty(self.shape, dtype=torch.float if self.floating else torch.int, device="meta")


def weight_files(source: Path) -> list[Path]:
    """
    Returns the weight files that a checkpoint should have. A single file comes before an index, as in transformers,
    which leaves an older index or older shards beside it. Raises `ValueError` if the index names other files.
    """
    single = source / "model.safetensors"
    if not (source / INDEX).is_file():
        return [single]
    weight_map = read_json(source / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"source: {source / INDEX} has no `weight_map`. Download or save the checkpoint again.")
    for name in weight_map.values():
        if not isinstance(name, str) or PureWindowsPath(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"source: {source / INDEX} names {name!r}. It may only name .safetensors files of its own directory."
            )
    return [single] if single.is_file() else [source / name for name in sorted(set(weight_map.values()))]


def check_links(source: str | Path) -> None:
    """
    Raises `ValueError` if a file of a checkpoint is a link out of its directory, because a copy would then publish the
    file behind the link. Links from `snapshots` to `blobs` in the hub's cache are allowed.
    """
    root = Path(source).resolve()
    own = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for file in sorted(Path(source).iterdir()):
        named = any(fnmatchcase(file.name, pattern) for pattern in (*FILES, CODE, *WEIGHTS))
        if named and file.is_symlink() and not any(file.resolve().is_relative_to(place) for place in own):
            raise ValueError(
                f"source: {file} is a link to {file.resolve()}, outside of the checkpoint. Put the file itself there, "
                "or remove the link."
            )


def read_config(source: Path) -> dict:
    """Reads the config.json of a checkpoint. Raises `ValueError` if it or a weight file is missing."""
    if not (source / "config.json").is_file():
        if (source / "adapter_config.json").is_file():
            raise ValueError(
                f"source: {source} holds an adapter. `trl-quant export --adapter {source} --output DIR` merges it into "
                "its base, and quantizes the sum with `--format`."
            )
        raise ValueError(f"source: {source} has no config.json; give the directory of a checkpoint.")
    missing = [file.name for file in weight_files(source) if not file.is_file()]
    if missing:
        raise ValueError(f"source: {source} lacks {', '.join(missing)}; only safetensors checkpoints can be read.")
    return read_json(source / "config.json")


def read_heads(files: Iterable[Path]) -> dict[str, Stored]:
    """Lists the tensors of safetensors files, in the files' order. Raises `ValueError` for an incomplete file."""
    return {name: stored for file in files for name, stored in _head(file)}


def check_files(source: str | Path) -> None:
    """Raises `ValueError` if a safetensors file of a checkpoint, quantized or not, is incomplete."""
    read_heads(file for file in weight_files(Path(source)) if file.is_file())


def check_target(target: str | Path) -> None:
    """Raises `ValueError` if the target exists."""
    if Path(target).exists() or Path(target).is_symlink():
        raise ValueError(f"target: {target} exists; give a directory that does not.")


def read_tensors(heads: dict[str, Stored], names: Iterable[str], device: torch.device | str = "cpu") -> Tensors:
    """Reads some tensors of a checkpoint, by name."""
    from safetensors import safe_open

    result: Tensors = {}
    names = list(names)
    for file in dict.fromkeys(heads[name].file for name in names):
        with reading(file), safe_open(file, framework="pt", device=str(device)) as shard:
            result |= {name: shard.get_tensor(name) for name in names if heads[name].file == file}
    return {name: result[name] for name in names}


@contextmanager
def unfinished(target: str | Path, settings: dict) -> Iterator[Path]:
    """
    Context with a directory to write in. The directory becomes `target` when the context ends without an error. After
    an error its finished weight files are kept, and the next context with the same settings reuses them.

    Args:
        target (`str` or `Path`): Directory to create; must not exist.
        settings (`dict`): Everything that determines the result; JSON.

    Raises:
        ValueError: `target` exists; or the unfinished directory beside it belongs to other or unknown settings, or is
        being written by another process. OSError: The disk is full.
    """
    target = Path(target)
    check_target(target)
    settings = json.loads(json.dumps(settings))
    work = target.with_name(f".{target.name}.part")
    result = work / "result"
    for path in (work, result):
        if path.is_symlink():
            raise ValueError(f"target: {path} is a link, which no run leaves. Delete it.")
    with told_if_full(work):
        result.mkdir(parents=True, exist_ok=True)
        with locked(work / LOCK, f"target: another process is writing {work}. Wait for it, or stop it."):
            _check_left(work, settings)
            try:
                write_whole(work / STATE, json.dumps(settings))
                _keep_weights_alone(result)
                yield result
                result.rename(target)
            except BaseException:
                if any(work.rglob("*.safetensors")):
                    logger.warning("Finished files stay in %s: the same command continues from there.", work)
                else:
                    shutil.rmtree(work)
                raise
            shutil.rmtree(work)


def _check_left(work: Path, settings: dict) -> None:
    """Raises `ValueError` if `work` was left by a run with other settings, or by an unknown one."""
    try:
        before = read_json(work / STATE)
    except (FileNotFoundError, ValueError):
        found = [path for path in sorted(work.rglob("*")) if path.is_symlink() or not path.is_dir()]
        left = [str(path.relative_to(work)) for path in found if path not in (work / STATE, work / LOCK)]
        if left:
            raise ValueError(
                f"target: {work} holds {', '.join(left[:3])}, but no complete {STATE} that names its run. Delete the "
                "directory."
            ) from None
        return
    changed = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if changed:
        pairs = [(name, str(before.get(name))[:80], str(settings.get(name))[:80]) for name in changed]
        differences = ", ".join(f"{name}: {old} -> {new}" for name, old, new in pairs)
        raise ValueError(
            f"target: {work} was left by a run with other settings ({differences}). Repeat that run to "
            "finish it, or delete the directory."
        )


def _keep_weights_alone(result: Path) -> None:
    """Deletes everything except weight files: other files are written again, or do not belong to the copy."""
    for path in result.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.is_symlink() or path.suffix != ".safetensors":
            path.unlink()


def fingerprint(*sources: str | Path) -> dict[str, list[int]]:
    """Returns the size and the modification time of each file from which a copy of the checkpoints is made."""
    files = [
        file
        for source in map(Path, sources)
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in (".safetensors", ".json")
    ]
    return {str(file.absolute()): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def copy_files(source: Path, result: Path, with_code: bool) -> None:
    """
    Copies the files of a checkpoint other than its weights, and its Python files only with `with_code`. A run's records
    of the checkpoint stay behind, because they are not true of the copy: its files are others, and no run saved it.

    Raises:
        ValueError: As in [`check_links`].
    """
    from transformers.trainer import TRAINER_STATE_NAME

    check_links(source)
    patterns = (*FILES, CODE) if with_code else FILES
    left_out = ("*.index.json", MANIFEST, ROLLOUT_STATE_NAME, TRAINER_STATE_NAME)
    for item in source.iterdir():
        if matches(item.name, patterns) and not matches(item.name, left_out) and item.is_file():
            shutil.copyfile(item, result / item.name)


def rewrite_weights(
    heads: dict[str, Stored],
    result: Path,
    transform: Transform,
    unit: Callable[[str], str],
    device: torch.device | str = "cpu",
    max_shard_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """
    Writes those weight files of a changed copy that are not in `result` yet.

    Args:
        heads (`dict[str, Stored]`): The source's tensors, from [`read_heads`].
        result (`Path`): Directory to write in.
        transform (`Callable`): Function from the tensors of a unit, by name, to the tensors of the result.
        unit (`Callable`): Name of a tensor -> name of its unit. `transform` gets the tensors of a unit together.
        device (`torch.device` or `str`, *optional*): Where to compute.
        max_shard_bytes (`int`, *optional*, defaults to [`SHARD_BYTES`]):
            Largest size of a file, counted in 16 bits. A single unit may exceed it.
        progress (`Callable`, *optional*): Called with the bytes of each finished unit.
    """
    from safetensors.torch import save_file

    parts = _plan(heads, unit, max_shard_bytes or SHARD_BYTES)
    paths = [result / f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        paths = [result / "model.safetensors"]
    for path in set(result.glob("*.safetensors")) - set(paths):
        path.unlink()  # left by a run that divided the tensors into other files
    weight_map, total = {}, 0
    for path, part in zip(paths, parts, strict=True):
        if not _is_whole(path):
            shard: Tensors = {}
            for names in part:
                tensors = transform(read_tensors(heads, names, device))
                _check_finite(tensors)
                shard |= {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
                _tell(progress, heads, names)
            begun = path.with_suffix(".begun")
            try:
                save_file(shard, begun, metadata={"format": "pt"})
                begun.rename(path)
            finally:
                begun.unlink(missing_ok=True)
            del shard
        else:
            _tell(progress, heads, [name for names in part for name in names])
        for name, stored in _head(path):
            weight_map[name] = path.name
            total += stored.nbytes
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (result / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_finite(tensors: Tensors) -> None:
    """Raises `ValueError` for a tensor with NaN or infinity, which would be noticed only when the copy is loaded."""
    for name, tensor in tensors.items():
        wide = tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel()  # FP8: see its scale
        if wide and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise ValueError(
                f"{name} holds NaN or infinity, in the source or after an adapter was merged into it. Go back to a "
                "checkpoint whose weights are finite."
            )


def _tell(progress: Callable[[int], None] | None, heads: dict[str, Stored], names: Iterable[str]) -> None:
    if progress is not None:
        progress(sum(heads[name].nbytes for name in names))


def _plan(heads: dict[str, Stored], unit: Callable[[str], str], max_bytes: int) -> list[list[list[str]]]:
    """Divides the tensors into files, each a list of units, each a list of names; all in the order of the source."""
    units: dict[str, list[str]] = {}
    for name in heads:
        units.setdefault(unit(name), []).append(name)
    parts: list[list[list[str]]] = []
    size = 0
    for names in units.values():
        needed = sum(_bytes_in_16_bits(name, heads[name]) for name in names)
        if not parts or size + needed > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(names)
        size += needed
    return parts


def _bytes_in_16_bits(name: str, stored: Stored) -> int:
    """Returns the size of a tensor in 16 bits, to which quantized weights may be dequantized."""
    if name.endswith(".weight_packed"):  # two codes in a byte
        return 4 * stored.nbytes
    one_byte = name.endswith(".weight") and stored.nbytes == torch.Size(stored.shape).numel()
    return stored.nbytes * (2 if one_byte else 1)


def _is_whole(file: Path) -> bool:
    try:
        return file.is_file() and bool(_head(file))
    except ValueError:
        return False


def _head(file: Path) -> list[tuple[str, Stored]]:
    """Lists the tensors of a safetensors file. Raises `ValueError` if the file is incomplete."""
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="pt") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return [(name, _stored(file, piece.get_shape(), piece.get_dtype())) for name, piece in slices.items()]


def _stored(file: Path, shape: list[int], dtype: str) -> Stored:
    """Returns a tensor's description from safetensors' name of its type: BF16, F8_E4M3, I32, U8, BOOL."""
    bits = re.search(r"\d+", dtype)
    bits = int(bits[0]) if bits else 8
    return Stored(file, tuple(shape), dtype.startswith(("F", "BF")), torch.Size(shape).numel() * bits // 8)
