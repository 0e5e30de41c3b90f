"""Start models that are stored, so that runs on every machine start from the same bits.

    python benchmarks/study/starts.py 0 runs/study/models/start-0

Each `starts/K.safetensors.xz` was taught on one thread of a CPU, with a seed of its own, and rounded to BF16:

    python examples/build_arithmetic_model.py --seed SEED --output_dir runs/taught

K is 0 to 5 for the seeds 1, 3, 5, 4, 6 and 7. With seed 2 the model was right on 2% after 900 steps, and is left out.
`starts/SHA256SUMS` has the checksums of the files without `.xz`. All models get the same problems.
"""

import lzma
import sys
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from build_arithmetic_model import BuildArguments, build_model, build_tokenizer, prompts


STORED = Path(__file__).with_name("starts")
SUMS = STORED / "SHA256SUMS"
# An LZMA2 for numbers of two bytes
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 1, "lp": 1, "pb": 1}]


def weights_of(index: int, stored: Path = STORED) -> bytes:
    """Returns a model's safetensors file. Raises `ValueError` if it is not the one whose checksum is stored."""
    name = f"{index}.safetensors"
    found = lzma.decompress((stored / f"{name}.xz").read_bytes())
    digest = sha256(found).hexdigest()
    if f"{digest}  {name}" not in (stored / SUMS.name).read_text().splitlines():
        raise ValueError(f"{stored / name}.xz has the SHA-256 {digest}, which is not that of {SUMS.name}.")
    return found


def unpack(index: int, directory: Path) -> None:
    """Writes model, tokenizer and problems as `build_arithmetic_model.py` does, `eval.jsonl` last."""
    args, tokenizer = BuildArguments(train_problems=4096, eval_problems=512), build_tokenizer()
    model = build_model(tokenizer)
    model.load_state_dict(load(weights_of(index)))  # into float32
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    prompts(args, args.seed + 2, args.train_problems, held_out=False).to_json(directory / "train.jsonl")
    prompts(args, args.seed + 1, args.eval_problems, held_out=True).to_json(directory / "eval.jsonl")


def store(taught: Path, index: int) -> None:
    """Stores what `build_arithmetic_model.py` left in `taught` as model `index`, and its checksum."""
    weights = load((taught / "model.safetensors").read_bytes())
    data = save({name: tensor.to(torch.bfloat16) for name, tensor in sorted(weights.items())})
    STORED.mkdir(exist_ok=True)
    (STORED / f"{index}.safetensors.xz").write_bytes(lzma.compress(data, filters=FILTERS))
    with SUMS.open("a") as sums:
        sums.write(f"{sha256(data).hexdigest()}  {index}.safetensors\n")


if __name__ == "__main__":
    unpack(int(sys.argv[1]), Path(sys.argv[2]))
