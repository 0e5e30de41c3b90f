"""Short runs shared by the tests: a tiny model, a few prompts, rewards that differ within every group, or a teacher."""

import dataclasses
import functools

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import tiny_model, tiny_tokenizer
from trl import DistillationTrainer

from trl_quant import QuantGRPOTrainer


PROMPTS = [
    "1+1=",
    "What is 7 times 6?",
    "hello",
    "The sum of 12 and 30 is",
    "x",
    "count: one two",
    "99-1=",
    "abcdefgh",
]
TEACHER = 4  # its seed; the student's is 3
TIMINGS = ("step_time", "runtime", "samples_per_second", "steps_per_second", "total_flos", "profiling")


def dataset(n: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": [PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(n)]})


def spread(completions, **kwargs) -> list[float]:
    """A reward that differs within every group: the share of characters in the lower half of ASCII."""
    return [sum(ord(c) % 7 for c in text) / (6 * max(len(text), 1)) for text in completions]


class Killed(Exception):
    """A run that is stopped."""


def killing(kill_at: int | None):
    """A reward that differs within every group, and that kills the run at its call number `kill_at`, from 1."""
    calls = []

    def reward(completions, **kwargs) -> list[float]:
        calls.append(1)
        if len(calls) == kill_at:
            raise Killed
        return [float(sum(map(ord, str(one))) % 11) for one in completions]

    return reward


def killed_and_resumed(build, path, kill_at: int) -> tuple:
    """An unbroken run, and one that was killed and resumed. `build(path, kill_at=None)` builds with [`killing`]."""
    whole = build(path / "whole")
    whole.train()
    try:
        build(path / "broken", kill_at=kill_at).train()
    except Killed:
        resumed = build(path / "broken")
        resumed.train(resume_from_checkpoint=True)
        return whole, resumed
    raise AssertionError("the run was not killed")


def lora(**given) -> LoraConfig:
    settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return LoraConfig(**{"r": 4, "lora_alpha": 16} | settings | given)


class UnevenLengths:
    """A trainer whose completions end after lengths that their tokens decide, as those of models do."""

    def _generate_single_turn(self, *args, **kwargs):
        generated = super()._generate_single_turn(*args, **kwargs)
        completions, logps = generated if isinstance(generated, tuple) else (generated, None)
        lengths = [1 + sum(ids) % len(ids) for ids in completions]

        def cut(rows):
            return rows and [values[:length] for values, length in zip(rows, lengths, strict=True)]

        return (cut(completions), cut(logps)) if isinstance(generated, tuple) else cut(completions)


def fields_of(config_class) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class) if field.init}


def config(config_class, output_dir, **overrides):
    """Full precision (no autocast), two groups of four where there are groups, five steps, everything logged."""
    settings = {
        "output_dir": str(output_dir),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
        "shuffle_dataset": True,
    } | overrides
    for name in {"num_generations", "shuffle_dataset"} - fields_of(config_class):
        settings.pop(name, None)
    return config_class(**settings)


@functools.cache
def teacher():
    return tiny_model(seed=TEACHER)


def make(trainer_class, args, model=None, **kwargs):
    kwargs.setdefault("train_dataset", dataset())
    if issubclass(trainer_class, DistillationTrainer):
        kwargs.setdefault("teacher_model", teacher())
    else:
        kwargs.setdefault("reward_funcs", spread)
    kwargs.setdefault("processing_class", tiny_tokenizer())
    return trainer_class(model=model if model is not None else tiny_model(seed=3), args=args, **kwargs)


def trainer_for(path, model=None, kind=QuantGRPOTrainer, config_class=None, **given):
    """
    A trainer of a `kind`, whose files go to `path`. Of what is given, the fields of its config are settings of the run;
    the rest goes to the trainer.
    """
    config_class = config_class or kind.config_class
    fields = fields_of(config_class) | {"num_generations"}
    settings = {name: given.pop(name) for name in given.keys() & fields}
    return make(kind, config(config_class, path, **settings), model, **given)


def metrics(trainer) -> list[dict]:
    """Every logged metric except times; None where TRL had no valid value."""

    def is_timing(key: str) -> bool:
        return key.removeprefix("train_").removeprefix("eval_").startswith(TIMINGS)

    return [{k: v for k, v in entry.items() if not is_timing(k)} for entry in trainer.state.log_history]


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def assert_same_run(left, right) -> None:
    """Bit for bit: every logged metric and every parameter."""
    assert metrics(left) == metrics(right)
    mine, theirs = parameters(left), parameters(right)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different


def generation(trainer, prompts: int = 2, each: int = 4) -> dict:
    """The scored batch that the next step trains on: so many completions of each prompt."""
    trainer.model.train()
    trainer.state.max_steps = trainer.args.max_steps
    trainer.current_gradient_accumulation_steps = 1
    rows = [{"prompt": prompt} for prompt in dataset(prompts)["prompt"] for _ in range(each)]
    return trainer._generate_and_score_completions(rows)


def gradient_of(loss, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def scored_batches(trainer) -> list[dict]:
    """The list to which the trainer will add each generation, with its scores."""
    batches, score = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: batches.append(score(inputs)) or batches[-1]
    return batches


def leave_holes(trainer) -> None:
    """The sampler of the trainer will not score two of its tokens."""
    generate = trainer.vllm_generation.generate

    def holes(*args, **kwargs):
        samples = generate(*args, **kwargs)
        (turn,) = trainer.vllm_generation.turns
        turn.logps[0][1], turn.logps[1][0] = None, float("-inf")
        return samples

    trainer.vllm_generation.generate = holes


def step_and_batch(trainer) -> tuple[torch.Tensor, dict]:
    """The step of one update, as the change of the weights, and its generation."""
    batches = scored_batches(trainer)
    before = torch.cat([value.flatten() for value in parameters(trainer).values()]).double()
    trainer.train()
    return torch.cat([value.flatten() for value in parameters(trainer).values()]).double() - before, batches[0]


class MadeUpSampler:
    """Replaces vLLM where TRL itself samples: letters of a probability of their own, if they are asked for."""

    def __init__(self, logprobs, **others):
        self.asked_when_built, self.logprobs = logprobs, logprobs
        self.random = torch.Generator().manual_seed(0)

    def sync_weights(self): ...

    def generate(self, prompts, images, num_generations, profiler=None):
        ids = torch.randint(64, 90, (len(prompts), 5), generator=self.random).tolist()
        logps = None if self.logprobs is None else [[[-5.0]] * 5 for _ in ids]
        return prompts, ids, logps, None
