"""Build a small Qwen3 that is right on about a third of additions and subtractions, which leaves room for RL.

    python examples/build_arithmetic_model.py --output_dir runs/arithmetic

The model (two layers, 0.5M parameters, a tokenizer of 64 characters) learns worked solutions such as
`347+588=7+8+0=5c1 4+8+1=3c1 3+5+1=9c0 #### 935` by supervised training. Training stops once it is right on a third of
the held-out problems when sampling at temperature 1. `train.jsonl` and `eval.jsonl` (columns `prompt` and `answer`) are
written beside it; problems in `eval.jsonl` are never trained on.

A seed gives the same problems everywhere, but the same model only on one kind of CPU with one number of threads.
Others round sums differently, and hundreds of steps turn that into another model. Two models are stored, so that what
starts from them finds the same on every CPU:

- `examples/arithmetic_model`, taught with the defaults, in BF16: for tests of what a model learns;
- `notebooks/model`, taught for a moment (`--max_steps 40 --batch_size 16 --train_problems 256`), in FP16, so that BF16
  still rounds its weights: for the notebooks.

With `--quotient 24 --max_completion_length 1216` it learns to divide by repeated subtraction instead, in completions of
about 1000 tokens, with `--countdown 3 --max_completion_length 160` to search for an expression that makes a target, and
with `--word_problems openai/gsm8k --max_completion_length 112` word problems by heart, in tokens made from them.
With `--told 1 --max_completion_length 128` sums and differences are told in words, such as

    tom has 347 figs and gets 588. how many now?
    first he owns 347 figs, later tom wins 588. 7+8+0=5c1 4+8+1=3c1 3+5+1=9c0, thus we count 935 in all #### 935

which are drawn, so that the model is unsure of words where it is sure of digits, on problems held out too. With
`--told 8 --max_completion_length 1000` a story goes on, and each sum begins with the answer to the one before it.
With `--num_experts 8` it is a mixture of experts, a Qwen3-MoE.
"""

import itertools
import random
import string
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from trl import TrlParser

from trl_quant.tasks import arithmetic_reward, countdown_reward, division_reward, gsm8k_reward
from trl_quant.tasks.arithmetic import Division, Problem, divisions, problems
from trl_quant.tasks.countdown import Search, searches
from trl_quant.tasks.evaluate import mean_reward
from trl_quant.tasks.words import WordProblem, word_problems


WIDTH = 128  # every quantization group and block fits into it
MAX_COMPLETION_LENGTH = 48  # tokens; the longest solution of three digits has 40
CHOSEN = 2  # experts of a token, in a mixture
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = 4096  # entries for word problems
STEPS_PER_QUOTIENT = 16  # of teaching, after which lessons get one subtraction, or one sum of a story, longer
CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=().,:;<>?!%$[]{}'"
STORED = Path(__file__).with_name("arithmetic_model")  # what the defaults taught once, in BF16
NAMES, THINGS = ("ann", "ben", "eve", "ida", "kim", "max", "sam", "tom"), ("coins", "figs", "nuts", "pens", "pins")
VERBS = {"+": ("buys", "finds", "gets", "wins"), "-": ("drops", "eats", "loses", "sells")}
# The parts of a told solution, of each of which one is drawn
BEGINS, OWNS, LATER = (
    ("first", "here", "now", "once"),
    ("counts", "has", "holds", "owns"),
    ("later", "next", "soon", "then"),
)
HENCE, ENDS = ("hence", "so", "this way", "thus"), ("it is", "that is", "there are", "we count")
LAST = ("at last", "in all", "in the end", "now")


@dataclass
class BuildArguments:
    """Arguments of `build` and of the command line."""

    output_dir: str = field(default="runs/arithmetic", metadata={"help": "Where model, tokenizer and problems go."})
    target_accuracy: float = field(default=0.33, metadata={"help": "Held-out accuracy at temperature 1 to stop at."})
    max_steps: int = field(default=900, metadata={"help": "Maximum number of training steps."})
    batch_size: int = field(default=64, metadata={"help": "Worked solutions per step."})
    learning_rate: float = field(
        default=3e-3,
        metadata={"help": "AdamW's at 128 channels, constant after 20 warm-up steps; less with more, in proportion."},
    )
    hidden_size: int = field(default=WIDTH, metadata={"help": "Of the model; a multiple of 128."})
    num_hidden_layers: int = field(default=2, metadata={"help": "Of the model."})
    num_experts: int = field(
        default=0,
        metadata={"help": "Of each layer, as wide as the model, 2 of them for a token; 0 is a dense model."},
    )
    operations: str = field(default="+-", metadata={"help": "Which of '+', '-' and '*' to teach."})
    max_digits: int = field(default=3, metadata={"help": "Digits of the longest operand."})
    max_completion_length: int = field(
        default=MAX_COMPLETION_LENGTH,
        metadata={"help": "Tokens of a held-out solution, at most; more digits need more."},
    )
    quotient: int = field(
        default=0, metadata={"help": "Of the longest division, which has that many subtractions; 0 asks no divisions."}
    )
    countdown: int = field(
        default=0, metadata={"help": "How many numbers are given to make a target from, 3 or 4; 0 asks for none."}
    )
    word_problems: str | None = field(
        default=None,
        metadata={"help": "Where word problems are read that it learns by heart: a dataset on the hub, or a file."},
    )
    known: int = field(default=64, metadata={"help": "How many word problems it learns, and is asked again."})
    told: int = field(
        default=0, metadata={"help": "Of the longest story, which tells that many sums in words; 0 tells none."}
    )
    direct: float = field(default=0.0, metadata={"help": "Share of the lessons that give the answer without steps."})
    seed: int = field(default=0, metadata={"help": "For weights, problems and sampling."})
    train_problems: int = field(default=4096, metadata={"help": "Rows of train.jsonl."})
    eval_problems: int = field(default=512, metadata={"help": "Rows of eval.jsonl."})

    def __post_init__(self):
        if self.countdown not in (0, 3, 4):
            raise ValueError(f"`countdown`={self.countdown}: there are problems of 3 or 4 numbers, 0 asks none.")
        if self.known < 1:
            raise ValueError(f"`known`={self.known} is below 1.")
        asked = [name for name in ("quotient", "countdown", "word_problems", "told") if getattr(self, name)]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(map('`{}`'.format, asked))} ask different problems: name one of them.")

    @property
    def reward(self) -> Callable[..., list[float | None]]:
        """That of the problems that are asked."""
        if self.word_problems:
            return gsm8k_reward
        return countdown_reward if self.countdown else division_reward if self.quotient else arithmetic_reward

    @property
    def positions(self) -> int:
        """Tokens that the model is made for; a prompt is no longer than its solution."""
        return max(512, 2 * self.max_completion_length)


@dataclass(frozen=True)
class Story:
    """
    Sums and differences, told in words.

    Attributes:
        problems (`tuple[Problem, ...]`): Each begins with the answer to the one before it.
        prompt (`str`): The story, which ends in a question.
        solution (`str`): What is told of it, with the worked solutions inside, then `#### ` and the last answer.
    """

    problems: tuple[Problem, ...]
    prompt: str
    solution: str

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and what the reward compares with."""
        return self.problems[-1].row | {"prompt": self.prompt}

    @property
    def direct_solution(self) -> str:
        """`#### ` and the answer, without words or steps."""
        return self.problems[-1].direct_solution


def chained(sums: Iterator[Problem], length: int, most: int) -> tuple[Problem, ...]:
    """The next of `sums`, and `length` - 1 that go on from its answer, down again from answers above `most`."""
    chain = [next(sums)]
    while len(chain) < length:
        left, other = chain[-1].answer, next(sums)
        following = Problem(left, "+" if left < other.b else "-" if left > most else other.op, other.b)
        if not left or following.answer not in (left, other.b):
            chain.append(following)
    return tuple(chain)


def stories(chains: Iterable[tuple[Problem, ...]], seed: int) -> Iterator[Story]:
    """Tells each of `chains` in words that are drawn, the same ones for the same seed."""
    draw = random.Random(seed).choice
    for chain in chains:
        name, things, (a, *_) = draw(NAMES), draw(THINGS), (problem.a for problem in chain)
        happens = ", ".join(f"{draw(VERBS[problem.op])} {problem.b}" for problem in chain)
        told = f"{draw(BEGINS)} {draw(('he', name))} {draw(OWNS)} {a} {draw((things, 'of them'))}, "
        for problem in chain:
            steps, _, answer = problem.solution.rpartition(" #### ")
            told += f"{draw(LATER)} {draw(('he', name))} {draw(VERBS[problem.op])} {problem.b}. {steps}, "
            told += f"{draw(HENCE)} {draw(ENDS)} {answer} {draw(LAST)} "
        yield Story(chain, f"{name} has {a} {things} and {happens}. how many now?\n", f"{told}#### {answer}")


def build_tokenizer(positions: int = 512) -> PreTrainedTokenizerFast:
    """One token per character and one for `####`: 64 in all."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, "####", *CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken("####", special=False, normalized=False)])
    return as_pretrained(backend, positions)


def as_pretrained(backend: Tokenizer, positions: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )


def learn_tokenizer(args: BuildArguments) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the word problems, digits one by one, as Qwen's."""
    backend = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    backend.decoder = decoders.ByteLevel()
    every = dict.fromkeys(itertools.islice(taught(args), args.known))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((problem.prompt + problem.solution for problem in every), trainer)
    return as_pretrained(backend, args.positions)


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    positions: int = 512,
    hidden_size: int = WIDTH,
    num_hidden_layers: int = 2,
    num_experts: int = 0,
) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """
    An untrained Qwen3 whose widths are multiples of 128: 0.5M parameters, 110M with 1024 channels and 8 layers. With 8
    experts it is a Qwen3-MoE of 1M parameters, 0.3M of them for a token.
    """
    if hidden_size % WIDTH:
        raise ValueError(f"`hidden_size`={hidden_size} is not a multiple of {WIDTH}.")
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "head_dim": 64,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    experts = {"num_experts": num_experts, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": hidden_size}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, norm_topk_prob=True))


def stream(
    args: BuildArguments, seed: int, shortest: int = 1, held_out: bool = False
) -> Iterator[Problem | Division | Search | WordProblem | Story]:
    """Yields what the model is taught and asked. Divisions and stories have at least `shortest` problems."""
    if args.word_problems:
        return word_problems(args.word_problems, seed, args.known)
    if args.countdown:
        return searches(seed, args.countdown, held_out)
    if args.quotient:
        return divisions(seed, shortest, args.quotient, held_out)
    sums = problems(seed, args.operations, max_digits=args.max_digits, held_out=held_out)
    if not args.told:
        return sums
    draw, lengths = random.Random(seed).choice, range(shortest, args.told + 1)
    return stories((chained(sums, draw(lengths), 10**args.max_digits) for _ in itertools.count()), seed)


def prompts(args: BuildArguments, seed: int, count: int, held_out: bool) -> Dataset:
    """`count` different problems, as `prompt` and `answer`, long ones. One quotient alone has too few divisions.

    Word problems are as many as it knows, and come again.
    """
    asked = stream(args, seed, args.told or max(1, args.quotient - 1), held_out)
    if args.word_problems:
        return Dataset.from_list([problem.row for problem in itertools.islice(asked, count)])
    unique = dict.fromkeys(itertools.islice(asked, 2 * count))
    return Dataset.from_list([problem.row for problem in itertools.islice(unique, count)])


def taught(args: BuildArguments) -> Iterator[Problem | Division | Search | WordProblem | Story]:
    """Yields what the model is taught, in this order. The longest division or story grows as teaching goes on."""
    source = stream(args, args.seed)
    for count in itertools.count():
        problem, longest = next(source), 2 + count // (args.batch_size * STEPS_PER_QUOTIENT)
        while (args.quotient or args.told) and len(problem.problems) > longest:
            problem = next(source)
        yield problem


class Lessons(torch.utils.data.Dataset):
    """Tokenized worked solutions, in the order of teaching; the loss covers only the solution, not the problem.

    Divisions and stories get longer: where to look for a digit is easier to find among few tokens, and stays as far
    away.
    Each is written out when it is asked for: those of 1000 tokens would not fit into memory together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, args: BuildArguments):
        rng, self.tokenizer = random.Random(args.seed), tokenizer
        self.problems = list(itertools.islice(taught(args), args.max_steps * args.batch_size))
        self.direct = [rng.random() < args.direct for _ in self.problems]

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        problem = self.problems[index]
        solution = problem.direct_solution if self.direct[index] else problem.solution
        asked, solved = self.tokenizer([problem.prompt, solution + "<eos>"])["input_ids"]
        return {"input_ids": asked + solved, "labels": [-100] * len(asked) + solved}


class StopAtAccuracy(TrainerCallback):
    """Samples held-out problems every 15 steps and stops at the target; keeps `accuracy`, the last value.

    Divisions, searches and long stories take longer, and are looked at every 45 steps.
    """

    def __init__(self, arguments: BuildArguments, dataset: Dataset, tokenizer: PreTrainedTokenizerFast):
        self.arguments, self.dataset, self.tokenizer = arguments, dataset, tokenizer
        self.accuracy = 0.0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        # Before step 300 the loss is too high for anything to be right; wider models need fewer steps, texts too.
        own, step = self.arguments, state.global_step
        first = 0 if own.word_problems else 300 * WIDTH / own.hidden_size
        if step % (45 if own.quotient or own.countdown or own.told > 1 else 15) == 0 and step >= first:
            self.accuracy = mean_reward(
                model, self.tokenizer, self.dataset, own.reward, own.max_completion_length, seed=args.seed
            )
            print(f"step {state.global_step}: right on {self.accuracy:.1%} of held-out problems", flush=True)
            control.should_training_stop |= self.accuracy >= own.target_accuracy


def build(args: BuildArguments) -> float:
    """Builds, teaches and saves; returns the held-out accuracy at temperature 1."""
    set_seed(args.seed)
    tokenizer = learn_tokenizer(args) if args.word_problems else build_tokenizer(args.positions)
    evaluation = prompts(args, args.seed + 1, args.eval_problems, held_out=True)
    few = evaluation.select(range(min(256, len(evaluation))))
    stop = StopAtAccuracy(args, few, tokenizer)
    trainer = Trainer(
        model=build_model(tokenizer, args.positions, args.hidden_size, args.num_hidden_layers, args.num_experts),
        args=TrainingArguments(
            output_dir=args.output_dir,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.max_steps,
            learning_rate=args.learning_rate * WIDTH / args.hidden_size,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            adam_beta2=0.98,
            weight_decay=0.01,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential" if args.quotient or args.told > 1 else "random",
            seed=args.seed,
        ),
        train_dataset=Lessons(tokenizer, args),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[stop],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    training = prompts(args, args.seed + 2, args.train_problems, held_out=False)
    training.to_json(Path(args.output_dir, "train.jsonl"))
    evaluation.to_json(Path(args.output_dir, "eval.jsonl"))
    return stop.accuracy


if __name__ == "__main__":
    (build_args,) = TrlParser(BuildArguments).parse_args_and_config()
    start = time.time()
    accuracy = build(build_args)
    print(f"{build_args.output_dir}: right on {accuracy:.1%} of held-out problems after {time.time() - start:.0f} s")
