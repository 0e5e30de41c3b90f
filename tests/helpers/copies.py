"""Copies of checkpoints for the tests: their bytes, and quantizers that are cut off."""

from pathlib import Path

from trl_quant.formats import quantize


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def dying(after: int, how):
    """A quantizer that does `how` instead of its next-to-`after`th weight, and counts."""
    calls = []

    def quantizer(x, name, **kwargs):
        if len(calls) == after:
            how()
        calls.append(x.shape)
        return quantize(x, name, **kwargs)

    return quantizer, calls
