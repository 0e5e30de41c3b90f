"""Start models that are stored, so that runs on every machine start from the same bits.

    python benchmarks/study/starts.py 0 runs/study/models/start-0
    python benchmarks/study/starts.py mixture-0 runs/study/models/start-mixture-0

Each `starts/NAME.safetensors.xz` was taught on one thread of a CPU, with a seed of its own, and rounded to BF16:

    python examples/build_arithmetic_model.py --seed SEED --output_dir runs/taught

Dense models are 0 to 5, for the seeds 1, 3, 5, 4, 6 and 7. With seed 2 the model was right on 2% after 900 steps, and
is left out. Mixtures, taught with `--num_experts 8`, are mixture-0 to mixture-2, for the seeds 0, 3 and 4. With the
seeds 1 and 2 they were right on 8% and 2%, and are left out. `starts/SHA256SUMS` has the checksums of the files without
`.xz`. All models get the same problems.
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
ROUTER = "model.layers.0.mlp.gate.weight"  # with a row for each expert
SUMS = STORED / "SHA256SUMS"
# An LZMA2 for numbers of two bytes
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 1, "lp": 1, "pb": 1}]


def weights_of(name: str, stored: Path = STORED) -> bytes:
    """Returns a model's safetensors file. Raises `ValueError` if it is not the one whose checksum is stored."""
    file = f"{name}.safetensors"
    found = lzma.decompress((stored / f"{file}.xz").read_bytes())
    digest = sha256(found).hexdigest()
    if f"{digest}  {file}" not in (stored / SUMS.name).read_text().splitlines():
        raise ValueError(f"{stored / file}.xz has the SHA-256 {digest}, which is not that of {SUMS.name}.")
    return found


def unpack(name: str, directory: Path) -> None:
    """Writes model, tokenizer and problems as `build_arithmetic_model.py` does, `eval.jsonl` last."""
    args, tokenizer = BuildArguments(train_problems=4096, eval_problems=512), build_tokenizer()
    weights = load(weights_of(name))
    untrained = build_model(tokenizer, num_experts=len(weights.get(ROUTER, ())))
    # Under a checkpoint's names, which a mixture does not compute with
    model = type(untrained).from_pretrained(None, config=untrained.config, state_dict=weights, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    prompts(args, args.seed + 2, args.train_problems, held_out=False).to_json(directory / "train.jsonl")
    prompts(args, args.seed + 1, args.eval_problems, held_out=True).to_json(directory / "eval.jsonl")


def store(taught: Path, name: str) -> None:
    """Stores what `build_arithmetic_model.py` left in `taught` as model `name`, and its checksum."""
    weights = load((taught / "model.safetensors").read_bytes())
    data = save({key: tensor.to(torch.bfloat16) for key, tensor in sorted(weights.items())})
    STORED.mkdir(exist_ok=True)
    (STORED / f"{name}.safetensors.xz").write_bytes(lzma.compress(data, filters=FILTERS))
    with SUMS.open("a") as sums:
        sums.write(f"{sha256(data).hexdigest()}  {name}.safetensors\n")


if __name__ == "__main__":
    unpack(sys.argv[1], Path(sys.argv[2]))
