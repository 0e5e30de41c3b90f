"""
Measures the KL of the sampler from the policy for each precision, in the embedded engine, on the arithmetic model.

    python benchmarks/mismatch.py                                    # builds the model first, half a minute on a CPU
    python benchmarks/mismatch.py --model examples/arithmetic_model --policy bfloat16 --seeds 0 1 2

The trainer itself runs, with learning rate 0, so the policy stays as it was built. Each step samples from the copy at
temperature 1 and scores the samples with the policy. The table shows `mismatch/kl_k3` in nats a token, over all tokens
of a seed: the mean over the seeds, the smallest and the largest. The column `KL` in docs/precisions.md is the mean with
an FP32 policy, which differs from the copy only by the format's rounding. `mixed` is TRL's default: FP32 weights under
BF16 autocast. Another machine builds a slightly different model, and a larger model has other figures.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import datasets
import transformers
from engines import CUDA, machine, save
from transformers import PrinterCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.precisions import PRECISIONS
from trl_quant.tasks import arithmetic_reward, load_prompts


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from build_arithmetic_model import MAX_COMPLETION_LENGTH, BuildArguments, build


METRICS = ("kl_k3", "kl_k1", "abs_logp_diff", "ess_ratio", "max_weight")
POLICIES = {
    "float32": {"bf16": False},
    "mixed": {"bf16": True, "use_cpu": not CUDA},
    "bfloat16": {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}},
}
BATCH = 128


def measure(model: Path, precision: str, policy: str, seed: int, steps: int) -> dict[str, float]:
    """Returns the metrics over the tokens of a seed, and the number of `tokens`."""
    trainer = QuantGRPOTrainer(
        model=str(model),
        reward_funcs=arithmetic_reward,
        args=QuantGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            rollout_precision=precision,
            is_correction="none",
            learning_rate=0.0,
            lr_scheduler_type="constant",
            max_steps=steps,
            seed=seed,
            per_device_train_batch_size=BATCH,
            num_generations=8,
            max_completion_length=MAX_COMPLETION_LENGTH,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **POLICIES[policy],
        ),
        train_dataset=load_prompts(str(model / "train.jsonl")),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    tokens = [round(BATCH * entry["completions/mean_length"]) for entry in logs]
    found = {"tokens": sum(tokens)}
    for name in METRICS:
        values = [entry[f"mismatch/{name}"] for entry in logs]
        mean = sum(n * value for n, value in zip(tokens, values, strict=True)) / sum(tokens)
        found[name] = max(values) if name == "max_weight" else mean
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--model", type=Path, help="what examples/build_arithmetic_model.py wrote; built if not given")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--policy", choices=POLICIES, default="float32", help="types that the trainer computes in")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=2, help=f"generations of {BATCH} completions for each seed")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()
    quiet()
    if args.model is None:
        args.model = Path(tempfile.mkdtemp(), "model")
        build(BuildArguments(output_dir=str(args.model)))

    print(f"{machine()}, policy in {args.policy}, seeds {args.seeds}")
    print(
        f"{'precision':<12}{'tokens':>8}{'KL k3':>10}{'smallest':>10}{'largest':>10}{'KL k1':>10}"
        f"{'|dlogp|':>10}{'ESS':>9}{'max w':>8}",
        flush=True,
    )
    results = {}
    for precision in args.precisions:
        runs = [measure(args.model, precision, args.policy, seed, args.steps) for seed in args.seeds]
        results[precision] = dict(zip(map(str, args.seeds), runs, strict=True))
        mean = {name: sum(run[name] for run in runs) / len(runs) for name in METRICS}
        kl = [run["kl_k3"] for run in runs]
        print(
            f"{precision:<12}{sum(run['tokens'] for run in runs):>8}{mean['kl_k3']:>10.1e}{min(kl):>10.1e}"
            f"{max(kl):>10.1e}{mean['kl_k1']:>10.1e}{mean['abs_logp_diff']:>10.1e}{mean['ess_ratio']:>9.4f}"
            f"{max(run['max_weight'] for run in runs):>8.2f}",
            flush=True,
        )
    arguments = {name: getattr(args, name) for name in ("policy", "seeds", "steps")}
    save(f"mismatch-{args.policy}", {"arguments": arguments, "results": results}, args.output)


def quiet() -> None:
    """Silences the progress bars and notices of libraries."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
