"""Runs TRL's own tests of `GRPOTrainer`, unchanged, on TRL's class and on ours in its place, and compares.

    python tests/upstream/run.py --trl ~/src/trl [--variants quant ais] [-- -k loss_types]

`--trl` is a checkout of TRL, best of the tag that is installed (`git clone -b v1.16.0 https://github.com/huggingface/trl`);
nothing of it is copied here and nothing is downloaded: models and data sets are built by `stand_in_hub.py`.
What follows `--` goes to pytest. The tests of vision models need torchvision.

A test that passes with TRL's class (the baseline) must pass with ours, and `QuantGRPOTrainer`, which with defaults is
`GRPOTrainer`, must also log the same numbers bit for bit in every test that trains. Exits with 1 if not.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path


HERE = Path(__file__).parent
# variant -> (trainer, config) of trl_quant, empty for TRL's own
VARIANTS = {
    "trl": ("", ""),
    "quant": ("QuantGRPOTrainer", ""),
    "quant-config": ("QuantGRPOTrainer", "QuantGRPOConfig"),
    "ais": ("AISGRPOTrainer", ""),
    "ais-config": ("AISGRPOTrainer", "AISGRPOConfig"),
}
IDENTICAL = ("quant", "quant-config")


def run(variant: str, args: argparse.Namespace) -> dict[str, dict]:
    """The record of each test, by its name, of one run of pytest in a process of its own."""
    trainer, config = VARIANTS[variant]
    record = args.work / f"{variant}.jsonl"
    record.unlink(missing_ok=True)
    environment = os.environ | {
        "UPSTREAM_TRAINER": trainer,
        "UPSTREAM_CONFIG": config,
        "UPSTREAM_WORK": str(args.work),
        "UPSTREAM_RECORD": str(record),
        "UPSTREAM_TIMEOUT": str(args.timeout),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(args.work / "cache"),
        "HF_MODULES_CACHE": str(args.work / "modules"),
        "HF_HUB_CACHE": str(args.work / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # append: the checkout's own `trl` must not come before the installed one
    command = [sys.executable, "-P", "-m", "pytest", "-p", "substitution", "--import-mode=append", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", *args.pytest, str(args.trl / "tests" / "test_grpo_trainer.py")]
    with (args.work / f"{variant}.log").open("w") as log:
        subprocess.run(command, cwd=args.work, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if not record.exists():
        sys.exit(f"{variant}: no test ran, see {log.name}")
    return {line["test"]: line for line in map(json.loads, record.read_text().splitlines())}


def compare(variant: str, ours: dict[str, dict], baseline: dict[str, dict]) -> list[str]:
    """What differs from the baseline, one line each; empty where ours is as good."""
    passed = {name for name, line in baseline.items() if line["outcome"] == "passed"}
    missing = {"outcome": "not run", "reason": ""}
    lost = {name: ours.get(name, missing) for name in passed}
    found = [f"{name}: {now['outcome']}: {now['reason']}" for name, now in lost.items() if now["outcome"] != "passed"]
    both = [name for name in passed if lost[name]["outcome"] == "passed"]
    other = [name for name in both if ours[name]["logs"] != baseline[name]["logs"]]
    trained = sum(baseline[name]["logs"] is not None for name in both)
    print(f"{variant}: of {len(passed)} tests that pass with TRL's class {len(both)} pass; ", end="")
    print(f"of {trained} that train, {len(other)} log other numbers")
    return found + [f"{name}: logs other numbers" for name in other if variant in IDENTICAL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="checkout of TRL")
    parser.add_argument("--work", type=Path, default=Path("build/upstream"), help="for models, data and records")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[v for v in VARIANTS if v != "trl"])
    parser.add_argument("--keep-baseline", action="store_true", help="use the record of an earlier baseline")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one test")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args()
    args.trl, args.work = args.trl.resolve(), args.work.resolve()
    if not (args.work / "datasets").exists():
        subprocess.run([sys.executable, HERE / "stand_in_hub.py", args.work], check=True)

    record = args.work / "trl.jsonl"
    if args.keep_baseline and record.exists():
        baseline = {line["test"]: line for line in map(json.loads, record.read_text().splitlines())}
    else:
        baseline = run("trl", args)
    print("trl:", dict(Counter(line["outcome"] for line in baseline.values())))
    for name, line in baseline.items():
        if line["outcome"] not in ("passed", "skipped"):
            print(f"  {name}: {line['outcome']}: {line['reason'].splitlines()[0][:150]}")
    found = []
    for variant in args.variants:
        if variant != "trl":
            found += [f"{variant} {line}" for line in compare(variant, run(variant, args), baseline)]
    print(*found, sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
