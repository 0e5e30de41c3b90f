"""Build a small masked diffusion model that is right on a part of its additions, which leaves room for RL.

    python examples/build_masked_model.py --output_dir runs/masked

The model (a Qwen3 of two layers that attends in both directions, 0.5M parameters, a tokenizer of 65 characters) learns
answers such as `34+58=#### 92` as LLaDA is fine-tuned: the answer is padded to the canvas with end tokens, each of the
canvas's tokens is masked with a probability t that is drawn for each answer, and the loss of the masked tokens is
divided by t. Training stops once the model is right on a third of the held-out problems, denoised at temperature 1,
after a minute or two. `train.jsonl` and `eval.jsonl` (columns `prompt` and `answer`) are written beside the model;
problems in `eval.jsonl` are never trained on. As in `build_arithmetic_model.py`, the same seed gives another model on
another kind of CPU.
"""

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from build_arithmetic_model import build_model, build_tokenizer
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed
from trl import TrlParser

from trl_quant.rollout.embedded.diffusion import Schedule, denoise
from trl_quant.tasks import arithmetic_reward
from trl_quant.tasks.arithmetic import Problem, problems


LENGTH = 8  # tokens of the canvas
MASK = "<mask>"
EVAL_STEPS = 50  # the model is judged after so many steps


@dataclass
class BuildArguments:
    """Arguments of `build` and of the command line."""

    output_dir: str = field(default="runs/masked", metadata={"help": "Where model, tokenizer and problems go."})
    target_accuracy: float = field(default=0.33, metadata={"help": "Held-out accuracy at which training stops."})
    max_steps: int = field(default=6000, metadata={"help": "Training steps at most."})
    batch_size: int = field(default=128, metadata={"help": "Answers per step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "AdamW's."})
    seed: int = field(default=0, metadata={"help": "For weights, problems and masks."})
    train_problems: int = field(default=2048, metadata={"help": "Rows of train.jsonl."})
    eval_problems: int = field(default=256, metadata={"help": "Rows of eval.jsonl."})


def asked(seed: int, held_out: bool = False):
    """Yields additions of two numbers of two digits."""
    return problems(seed, "+", min_digits=2, max_digits=2, held_out=held_out)


def canvas(tokenizer: PreTrainedTokenizerFast, batch: list[Problem]) -> tuple[Tensor, Tensor]:
    """Returns prompts (B, P), all of one length, and answers (B, LENGTH), padded with end tokens."""
    prompts = torch.tensor(tokenizer([problem.prompt for problem in batch])["input_ids"])
    answers = tokenizer([problem.direct_solution for problem in batch])["input_ids"]
    return prompts, torch.tensor([(ids + [tokenizer.eos_token_id] * LENGTH)[:LENGTH] for ids in answers])


def masked_loss(model: PreTrainedModel, prompts: Tensor, answers: Tensor, mask_token_id: int) -> Tensor:
    """
    Computes LLaDA's loss for fine-tuning. Each answer draws a probability t, each of its tokens is masked with
    probability t, and the cross-entropy of the masked tokens is divided by t.
    """
    share = torch.rand(len(answers), 1).clamp(min=1e-3)
    is_masked = torch.rand(answers.shape) < share
    shown = torch.cat([prompts, answers.masked_fill(is_masked, mask_token_id)], 1)
    logits = model(input_ids=shown).logits[:, prompts.shape[1] :]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
    return (losses.view(answers.shape) * is_masked / share).mean()


def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: Dataset, seed: int = 0) -> float:
    """The share of problems that denoising at temperature 1 solves. The global random state stays as it is."""
    prompts = torch.tensor(tokenizer(list(rows["prompt"]))["input_ids"])
    schedule, ends = Schedule(LENGTH, LENGTH, 2, 1.0), [tokenizer.eos_token_id]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = denoise(model, prompts, torch.ones_like(prompts), schedule, tokenizer.mask_token_id, ends)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in written]
    rewards = arithmetic_reward(completions=texts, answer=list(rows["answer"]))
    return sum(rewards) / len(rewards)


def build(args: BuildArguments) -> float:
    """Builds, teaches and saves; returns the held-out accuracy at temperature 1."""
    set_seed(args.seed)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    model = build_model(tokenizer)
    model.config.is_causal = False
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.98))
    rows = {}
    for name, count in (("train", args.train_problems), ("eval", args.eval_problems)):
        unique = dict.fromkeys(itertools.islice(asked(args.seed + 1, held_out=name == "eval"), 2 * count))
        rows[name] = Dataset.from_list([problem.row for problem in itertools.islice(unique, count)])
    source, found = asked(args.seed), 0.0
    for step in range(1, args.max_steps + 1):
        batch = list(itertools.islice(source, args.batch_size))
        masked_loss(model, *canvas(tokenizer, batch), tokenizer.mask_token_id).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVAL_STEPS == 0 or step == args.max_steps:
            found = accuracy(model, tokenizer, rows["eval"])
            print(f"step {step}: right on {found:.1%} of held-out problems", flush=True)
            if found >= args.target_accuracy:
                break
    model.eval().save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    for name, dataset in rows.items():
        dataset.to_json(Path(args.output_dir, f"{name}.jsonl"))
    return found


if __name__ == "__main__":
    (build_args,) = TrlParser(BuildArguments).parse_args_and_config()
    start = time.time()
    share = build(build_args)
    print(f"{build_args.output_dir}: right on {share:.1%} of held-out problems after {time.time() - start:.0f} s")
