"""
Checkpoints on disk: reading the heads of safetensors files, and writing a changed copy that survives a killed process.

A copy is planned from the heads alone: which tensors go together into which file of the result. Each file is computed
by itself, whichever files of the source its tensors lie in, and appears under its name when it is whole, so that a run
that was killed goes on with the first file that is missing. The copy lies in `.NAME.part` beside the target and takes
the target's name as its last step.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


logger = logging.getLogger(__name__)

# What a copy of a checkpoint takes over beside the weights: no data, no pickles, and code only where it is trusted
FILES = ("*.json", "*.jinja", "*.md", "*.model", "*.tiktoken", "*.txt", "LICENSE", "NOTICE")
INDEX = "model.safetensors.index.json"
CODE = "*.py"
SHARD_BYTES = 4 << 30
STATE = "run.json"

Tensors = dict[str, Tensor]
Transform = Callable[[Tensors], Tensors]


class Stored(NamedTuple):
    """
    One tensor of a checkpoint, from the head of its file.

    Attributes:
        file (`Path`): Where it lies.
        shape (`tuple[int, ...]`): Its shape.
        floating (`bool`): Whether it holds floating-point numbers.
        nbytes (`int`): Its size in bytes.
    """

    file: Path
    shape: tuple[int, ...]
    floating: bool
    nbytes: int

    @property
    def like(self) -> Tensor:
        """A tensor without memory of that shape, floating-point if it is."""
        return torch.empty(self.shape, dtype=torch.float if self.floating else torch.int, device="meta")


def weight_files(source: Path) -> list[Path]:
    """The safetensors files that a checkpoint should have."""
    if not (source / INDEX).is_file():
        return [source / "model.safetensors"]
    return [source / name for name in sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))]


def read_config(source: Path) -> dict:
    """config.json of a checkpoint; `ValueError` without one, or where a weight file is missing."""
    if not (source / "config.json").is_file():
        raise ValueError(f"source: {source} has no config.json; give the directory of a checkpoint.")
    if missing := [file.name for file in weight_files(source) if not file.is_file()]:
        raise ValueError(f"source: {source} lacks {', '.join(missing)}; only safetensors checkpoints can be read.")
    return json.loads((source / "config.json").read_text())


def read_heads(files: Iterable[Path]) -> dict[str, Stored]:
    """All tensors of safetensors files, in the files' order; `ValueError` for a file that is not whole."""
    return {name: stored for file in files for name, stored in _head(file)}


def check_files(source: str | Path) -> None:
    """Raises `ValueError` for a safetensors file of a checkpoint, quantized or not, that is not whole."""
    read_heads(file for file in weight_files(Path(source)) if file.is_file())


def check_target(target: str | Path) -> None:
    """Raises `ValueError` for a target that exists."""
    if Path(target).exists():
        raise ValueError(f"target: {target} exists; give a directory that does not.")


def read_tensors(heads: dict[str, Stored], names: Iterable[str], device: torch.device | str = "cpu") -> Tensors:
    """Some tensors of a checkpoint, by name."""
    from safetensors import safe_open

    result: Tensors = {}
    names = list(names)
    for file in dict.fromkeys(heads[name].file for name in names):
        with safe_open(file, framework="pt", device=str(device)) as shard:
            result |= {name: shard.get_tensor(name) for name in names if heads[name].file == file}
    return {name: result[name] for name in names}


@contextmanager
def unfinished(target: str | Path, settings: dict) -> Iterator[Path]:
    """
    Context with a directory to write in, which becomes `target` when the context ends without an error. After an error
    its finished weight files are kept, and the next context with the same settings has them.

    Args:
        target (`str` or `Path`): Directory to create; must not exist.
        settings (`dict`): What determines the result; JSON.

    Raises:
        ValueError: `target` exists, or what is unfinished beside it has other settings or is being written.
    """
    target = Path(target)
    check_target(target)
    settings = json.loads(json.dumps(settings))
    work = target.with_name(f".{target.name}.part")
    (result := work / "result").mkdir(parents=True, exist_ok=True)
    with _alone(work):
        state = work / STATE
        before = json.loads(state.read_text()) if state.is_file() and state.stat().st_size else settings
        if changed := [name for name in settings if before.get(name) != settings[name]]:
            pairs = [(name, str(before.get(name))[:80], str(settings[name])[:80]) for name in changed]
            differences = ", ".join(f"{name}: {old} -> {new}" for name, old, new in pairs)
            raise ValueError(
                f"target: {work} is what is left of a run with other settings ({differences}). Repeat that run to "
                "finish it, or delete the directory."
            )
        state.write_text(json.dumps(settings))
        try:
            yield result
            result.rename(target)
        except BaseException:
            if any(result.parent.rglob("*.safetensors")):
                logger.warning("What is finished stays in %s: the same command goes on from there.", work)
            else:
                shutil.rmtree(work)
            raise
        shutil.rmtree(work)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Context in which no other process writes in `work`; the system ends it with the process, however that dies."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (work / STATE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"target: another process is writing {work}; wait for it, or stop it.") from None
        yield


def fingerprint(*sources: str | Path) -> dict[str, list[int]]:
    """Size and time of the last change of each file that a copy of the checkpoints is made from."""
    files = [
        file
        for source in map(Path, sources)
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in (".safetensors", ".json")
    ]
    return {str(file.absolute()): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def copy_files(source: Path, result: Path, with_code: bool) -> None:
    """Copies what belongs to a checkpoint beside its weights; its Python files only with `with_code`."""
    patterns = (*FILES, CODE) if with_code else FILES
    for item in source.iterdir():
        named = any(fnmatchcase(item.name, pattern) for pattern in patterns)
        if named and item.is_file() and not item.name.endswith(".index.json"):
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
    Writes the weight files of a changed copy, those that `result` does not hold already.

    Args:
        heads (`dict[str, Stored]`): The source, from [`read_heads`].
        result (`Path`): Directory to write in.
        transform (`Callable`): From the tensors of a unit, by name, to those of the result.
        unit (`Callable`): Name of a tensor -> name of its unit: tensors that `transform` must see together.
        device (`torch.device` or `str`, *optional*): Where to compute.
        max_shard_bytes (`int`, *optional*, defaults to [`SHARD_BYTES`]):
            Most that the tensors of a file would take in 16 bits, unless one unit takes more.
        progress (`Callable`, *optional*): Called with the bytes of each unit that is finished.
    """
    from safetensors.torch import save_file

    parts = _plan(heads, unit, max_shard_bytes or SHARD_BYTES)
    paths = [result / f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        paths = [result / "model.safetensors"]
    weight_map, total = {}, 0
    for path, part in zip(paths, parts, strict=True):
        if not _is_whole(path):
            shard: Tensors = {}
            for names in part:
                tensors = transform(read_tensors(heads, names, device))
                shard |= {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
                _tell(progress, heads, names)
            begun = path.with_suffix(".begun")
            save_file(shard, begun, metadata={"format": "pt"})
            begun.rename(path)
            del shard
        else:
            _tell(progress, heads, [name for names in part for name in names])
        for name, stored in _head(path):
            weight_map[name] = path.name
            total += stored.nbytes
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (result / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _tell(progress: Callable[[int], None] | None, heads: dict[str, Stored], names: Iterable[str]) -> None:
    if progress is not None:
        progress(sum(heads[name].nbytes for name in names))


def _plan(heads: dict[str, Stored], unit: Callable[[str], str], max_bytes: int) -> list[list[list[str]]]:
    """Files of units of names, all in the order of the source."""
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
    """Quantized weights are counted as what they become when they are dequantized."""
    if name.endswith(".weight_packed"):  # two numbers in a byte
        return 4 * stored.nbytes
    one_byte = name.endswith(".weight") and stored.nbytes == torch.Size(stored.shape).numel()
    return stored.nbytes * (2 if one_byte else 1)


def _is_whole(file: Path) -> bool:
    try:
        return file.is_file() and bool(_head(file))
    except ValueError:
        return False


def _head(file: Path) -> list[tuple[str, Stored]]:
    """What the head of a safetensors file says; `ValueError` for a file that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            return [(name, _stored(file, piece.get_shape(), piece.get_dtype())) for name, piece in slices.items()]
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: {error}. Download or save it again.") from error


def _stored(file: Path, shape: list[int], dtype: str) -> Stored:
    """By safetensors' name of the type: BF16, F8_E4M3, I32, U8, BOOL."""
    bits = re.search(r"\d+", dtype)
    bits = int(bits[0]) if bits else 8
    return Stored(file, tuple(shape), dtype.startswith(("F", "BF")), torch.Size(shape).numel() * bits // 8)
