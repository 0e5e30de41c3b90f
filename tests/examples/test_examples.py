"""The examples do what they say: the model builds, what a user copies trains (on two processes too), the demo ends."""

import os
import re
import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from long_tests import rest_is_long
from places import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_quant.report.runs import read_run
from trl_quant.tasks import arithmetic_reward, load_prompts
from trl_quant.tasks.arithmetic import Division, Problem, problems
from trl_quant.tasks.evaluate import mean_reward
from trl_quant.tasks.splits import is_held_out


sys.path.insert(0, str(ROOT / "examples"))

import build_arithmetic_model as building
import demo


pytestmark = pytest.mark.isa


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The arithmetic model, barely taught."""
    directory = tmp_path_factory.mktemp("arithmetic") / "model"
    building.build(arguments(directory))
    return directory


def arguments(directory: Path, **overrides) -> building.BuildArguments:
    settings = {"max_steps": 2, "batch_size": 8, "train_problems": 32, "eval_problems": 16}
    return building.BuildArguments(output_dir=str(directory), **settings | overrides)


# The model


def test_the_same_seed_builds_the_same_model(built, tmp_path):
    building.build(arguments(tmp_path / "again"))
    building.build(arguments(tmp_path / "other", seed=1))
    weights = [(path / "model.safetensors").read_bytes() for path in (built, tmp_path / "again", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]
    for name in ("train.jsonl", "eval.jsonl"):
        assert (built / name).read_text() == (tmp_path / "again" / name).read_text()
        assert (built / name).read_text() != (tmp_path / "other" / name).read_text()


def test_teaching_teaches(tmp_path):
    """A solution that was never taught has half the nats of the best guess that knows only how frequent tokens are."""
    building.build(arguments(tmp_path / "model", max_steps=40, batch_size=32))
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    solved = list(islice(problems(seed=1, operations="+-", max_digits=3, held_out=True), 64))
    rows = [tokenizer([p.prompt, p.solution + "<eos>"])["input_ids"] for p in solved]
    losses = []
    for asked, solution in rows:
        labels = torch.tensor([[-100] * len(asked) + solution])
        with torch.no_grad():
            losses += [model(torch.tensor([asked + solution]), labels=labels).loss] * len(solution)
    frequency = torch.bincount(torch.tensor([token for _, solution in rows for token in solution])).double()
    guess = torch.special.entr(frequency / frequency.sum()).sum()
    assert torch.stack(losses).mean() < guess / 2


def test_the_stored_model_is_right_on_a_third():
    tokenizer = AutoTokenizer.from_pretrained(building.STORED)
    model = AutoModelForCausalLM.from_pretrained(building.STORED, dtype=torch.float32)
    asked = load_prompts(str(building.STORED / "eval.jsonl"))
    assert asked["prompt"] == building.prompts(building.BuildArguments(), 1, 256, held_out=True)["prompt"]
    share = mean_reward(model, tokenizer, asked, arithmetic_reward, building.MAX_COMPLETION_LENGTH, seed=0)
    assert 0.3 < share < 0.4


def test_model_and_tokenizer_load_anywhere(built):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer) == 64
    assert model.config.eos_token_id == tokenizer.eos_token_id and tokenizer.pad_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.chat_template is None
    linears = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert all(m.in_features % 128 == 0 and m.out_features % 128 == 0 for m in linears)

    text = "347+588=7+8+0=5c1 4+8+1=3c1 3+5+1=9c0 #### 935"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) - 3  # a token a character, and one for ####
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.unk_token_id not in tokenizer(building.CHARACTERS)["input_ids"]
    assert tokenizer("Ä")["input_ids"] == [tokenizer.unk_token_id]


def test_the_longest_solution_fits():
    tokenizer = building.build_tokenizer()
    longest = max(len(tokenizer(p.solution)["input_ids"]) for p in (Problem(999, "+", 999), Problem(999, "*", 9)))
    assert longest + 1 <= building.MAX_COMPLETION_LENGTH  # with <eos>


def test_only_solutions_are_learned():
    tokenizer = building.build_tokenizer()
    rows = building.Lessons(tokenizer, building.BuildArguments(max_steps=2, batch_size=4, seed=5))
    assert len(rows) == 8
    for row, problem in zip(rows, problems(5, "+-", max_digits=3)):
        learned = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(row["input_ids"]) == problem.prompt + problem.solution + "<eos>"
        assert tokenizer.decode(learned) == problem.solution + "<eos>"
        assert len(row["labels"]) == len(row["input_ids"])


@pytest.mark.parametrize("direct", [0.0, 0.5])
def test_divisions_are_taught_at_all_lengths_and_asked_at_the_longest(direct):
    tokenizer, args = building.build_tokenizer(), building.BuildArguments(quotient=6, max_steps=64, direct=direct)
    args.batch_size, written, lengths = 16, 0, []
    rows = building.Lessons(tokenizer, args)
    for row in rows:
        text, learned = map(tokenizer.decode, (row["input_ids"], [label for label in row["labels"] if label != -100]))
        division = Division(*map(int, text.partition("=")[0].split("%")))
        assert not division.held_out and text == division.prompt + learned
        assert learned in (division.solution + "<eos>", division.direct_solution + "<eos>")
        written += learned == division.solution + "<eos>"
        lengths.append(learned.count(";"))
    assert len(lengths) == 1024 and written / 1024 == pytest.approx(1 - direct, abs=0.065 if direct else 0)
    assert [set(lengths[i : i + 256]) for i in range(0, 1024, 256)] == [set(range(1, n + 1)) for n in (2, 3, 4, 5)]
    asked = {held_out: building.prompts(args, 1, 64, held_out) for held_out in (False, True)}
    assert all({answer.count(";") + 1 for answer in rows["answer"]} == {5, 6} for rows in asked.values())
    assert all(is_held_out(prompt) is held_out for held_out, rows in asked.items() for prompt in rows["prompt"])


def test_sums_are_told_in_words():
    """Around the worked solution, which the reward reads; the words are drawn, the numbers held out as before."""
    args = building.BuildArguments(told=1)
    lessons = [*islice(building.taught(args), 300)]
    assert lessons == [*islice(building.taught(args), 300)]
    asked = building.prompts(args, 1, 50, held_out=True)
    for story in lessons:
        (problem,) = story.problems
        numbers = [str(problem.a), str(problem.b)]
        assert not problem.held_out
        assert re.findall(r"\d+", story.prompt) == numbers and story.row["prompt"] == story.prompt
        steps = problem.solution.rpartition(" #### ")[0]
        assert story.solution.count(f" {numbers[1]}. {steps}, ") == 1
        assert building.arithmetic_reward([story.solution], answer=[story.row["answer"]]) == [1.0]
        assert building.arithmetic_reward([story.solution + "0"], answer=[story.row["answer"]]) == [0.0]
    again = [*building.stories([lessons[0].problems] * 100, 0)]
    assert len({story.solution for story in again}) > 95 and len({story.prompt for story in again}) > 60
    for row in asked:
        a, b = re.findall(r"\d+", row["prompt"])
        assert any(
            each.held_out and str(each.answer) == row["answer"]
            for each in (building.Problem(int(a), op, int(b)) for op in "+-")
        )


def test_a_story_goes_on(tmp_path):
    """From answer to answer; lessons get longer, and what is asked has the full length."""
    args = building.BuildArguments(told=4, batch_size=4)
    lessons = [*islice(building.taught(args), 256)]
    lengths = [len(story.problems) for story in lessons]
    assert [set(lengths[i : i + 64]) for i in range(0, 256, 64)] == [{1, 2}, {1, 2, 3}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    verbs = {verb: op for op, verbs in building.VERBS.items() for verb in verbs}
    for story in islice(building.stream(args, 0, 4), 500):
        name, left = story.prompt.split()[0], int(re.search(r"\d+", story.prompt)[0])
        happened = re.findall(rf"({'|'.join(verbs)}) (\d+)", story.prompt)
        told = re.findall(rf"(?:he|{name}) ({'|'.join(verbs)}) (\d+)\. (\S+(?: \S+=\S+)*), \D+ (\d+) ", story.solution)
        assert len(happened) == len(told) == 4
        for (verb, b), (again, other, steps, answer) in zip(happened, told):
            problem = building.Problem(left, verbs[verb], int(b))
            left = problem.answer
            assert verbs[again] == verbs[verb] and other == b and answer == str(left) and 0 <= left < 2000
            assert problem.solution == f"{steps} #### {answer}"
        assert story.row["answer"] == str(left) and story.solution.endswith(f" #### {left}")
    asked = building.prompts(args, 1, 50, held_out=True)
    assert {len(re.findall(r"\d+", prompt)) for prompt in asked["prompt"]} == {5} and len(asked) == 50


def test_divisions_are_taught_in_their_order(tmp_path, monkeypatch):
    seen, lesson = [], building.Lessons.__getitem__
    monkeypatch.setattr(building.Lessons, "__getitem__", lambda self, index: seen.append(index) or lesson(self, index))
    building.build(arguments(tmp_path, quotient=3))
    assert seen == list(range(16))
    for split, held_out in (("train", False), ("eval", True)):
        rows = load_prompts(str(tmp_path / f"{split}.jsonl"))
        divisions = [Division(*map(int, prompt.rstrip("=").split("%"))) for prompt in rows["prompt"]]
        assert all(division.row == row and division.held_out is held_out for division, row in zip(divisions, rows))


def test_problems_to_train_and_evaluate_on(built):
    train, evaluation = (load_prompts(str(built / f"{split}.jsonl")) for split in ("train", "eval"))
    assert len(train) == len(set(train["prompt"])) == 32 and len(evaluation) == len(set(evaluation["prompt"])) == 16
    assert not set(train["prompt"]) & set(evaluation["prompt"])
    for dataset, held_out in ((train, False), (evaluation, True)):
        for prompt, answer in zip(dataset["prompt"], dataset["answer"]):
            op = next(c for c in prompt if c in "+-*")
            a, b = map(int, prompt.rstrip("=").split(op))
            assert Problem(a, op, b).held_out is held_out and str(Problem(a, op, b).answer) == answer


def test_a_wider_model_is_taught_in_smaller_steps(tmp_path, monkeypatch):
    rates, trainer = [], building.Trainer

    def taught(args, **others):
        rates.append(args.learning_rate)
        return trainer(args=args, **others)

    monkeypatch.setattr(building, "Trainer", taught)
    for name, width, layers in (("narrow", 128, 2), ("wide", 256, 3)):
        building.build(arguments(tmp_path / name, hidden_size=width, num_hidden_layers=layers))
        config = AutoModelForCausalLM.from_pretrained(tmp_path / name).config
        assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (width, 3 * width, layers)
    assert rates == [3e-3, 1.5e-3]
    with pytest.raises(ValueError, match="`hidden_size`=200 is not a multiple of 128"):
        building.build(arguments(tmp_path / "odd", hidden_size=200))
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"countdown": 2}, "`countdown`=2: there are problems of 3 or 4"),
        ({"countdown": 3, "quotient": 2}, "name one"),
        ({"countdown": 3, "word_problems": "x"}, "`word_problems` ask different"),
        ({"quotient": 2, "told": 1}, "`told` ask different"),
        ({"word_problems": "x", "known": 0}, "`known`=0 is below 1"),
    ],
)
def test_problems_that_are_not_asked(asked, says):
    with pytest.raises(ValueError, match=says):
        building.BuildArguments(**asked)


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        ({}, 330),
        ({"quotient": 24}, 405),
        ({"countdown": 3}, 405),
        ({"hidden_size": 1024}, 75),
        ({"word_problems": "words.jsonl"}, 45),
    ],
)
def test_teaching_stops_at_the_target(monkeypatch, asked, end):
    """At the third look, which divisions and searches get more rarely, and wide models and texts earlier."""
    scores = iter([0.1, 0.34, 0.36])
    monkeypatch.setattr(building, "mean_reward", lambda *args, **kwargs: next(scores))
    arguments = building.BuildArguments(target_accuracy=0.35, **asked)
    stop = building.StopAtAccuracy(arguments, dataset=None, tokenizer=None)
    stopped_at = None
    for step in range(1, 1200):
        control = SimpleNamespace(should_training_stop=False)
        stop.on_step_end(SimpleNamespace(seed=0), SimpleNamespace(global_step=step), control)
        if control.should_training_stop:
            stopped_at = step
            break
    assert stopped_at == end and stop.accuracy == 0.36


# What a user copies


def options(built: Path, output_dir: Path) -> list[str]:
    values = {
        "model_name_or_path": built,
        "dataset_name": built / "train.jsonl",
        "reward_funcs": "arithmetic",
        "rollout_precision": "int4",
        "is_correction": "ais",
        "output_dir": output_dir,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": "true",
        "bf16": "false",
        "gradient_checkpointing": "false",
    }
    return [str(part) for name, value in values.items() for part in (f"--{name}", value)]


def test_train_grpo(built, tmp_path, monkeypatch):
    arguments = [*options(built, tmp_path / "run"), "--num_generations", "4", "--use_cpu"]
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "train_grpo.py"), run_name="__main__")
    history = [entry for entry in read_run(tmp_path / "run").history if "mismatch/kl_k3" in entry]
    assert [entry["step"] for entry in history] == [1, 2]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run")


@pytest.mark.long
@pytest.mark.slow
def test_train_grpo_on_two_processes(built, tmp_path):
    """A group of 8 from two processes of 4 completions: impossible unless they know of each other."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(ROOT / "configs/accelerate/cpu.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / "examples/train_grpo.py"), *options(built, tmp_path / "run"), "--num_generations", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    history = [entry for entry in read_run(tmp_path / "run").history if "mismatch/kl_k3" in entry]
    assert [entry["step"] for entry in history] == [1, 2]


# The demo


SHOWN = {"full precision": 0.6, "int4 coupled": 0.1, "int4 default": 0.55, "fp8 default": 0.58}


@pytest.fixture
def small(monkeypatch):
    """Short runs that are right on a third of the problems at first, and then as often as returned here."""
    for name, value in {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}.items():
        monkeypatch.setitem(demo.SETTINGS, name, value)
    ends, before = dict(SHOWN), {}

    def held_out_accuracy(model) -> float:
        if model not in before:
            before[model] = list(demo.RUNS)[len(before)]
            return 0.33
        return ends[before[model]]

    monkeypatch.setattr(demo, "held_out_accuracy", held_out_accuracy)
    return ends


def test_demo(tmp_path, monkeypatch, capsys, small):
    args = demo.DemoArguments(output_dir=str(tmp_path / "demo"), steps=4)  # two generations
    assert demo.main(args) == 0
    printed = capsys.readouterr().out
    assert " ".join(demo.SHOWN.split()) in " ".join(printed.split()) and "The point" not in printed
    assert (tmp_path / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    runs = {name: read_run(tmp_path / "demo" / name.replace(" ", "-")) for name in demo.RUNS}
    for name, run in runs.items():
        assert len(run.values("reward")) == 2 and run.values("eval_accuracy") == [0.33, SHOWN[name]]
        assert run.status == "done" and len(run.values("mismatch/kl_k3")) == (0 if name == "full precision" else 2)
        (row,) = [line for line in printed.splitlines() if name in line and "%" in line]
        assert "33%" in row and f"{SHOWN[name]:.0%}" in row
        assert "collapses" in row if name == "int4 coupled" else "learns" in row
    kl = {name: run.values("mismatch/kl_k3")[0] for name, run in runs.items() if run.values("mismatch/kl_k3")}
    assert kl["int4 coupled"] == kl["int4 default"] > kl["fp8 default"] > 0  # the first step has the same samples

    # Finished runs are kept; runs whose settings changed, or that were removed, are repeated.
    trained = []
    monkeypatch.setattr(demo, "QuantGRPOTrainer", lambda **kwargs: trained.append(kwargs["args"].output_dir) or 1 / 0)
    assert demo.main(args) == 0 and not trained
    (tmp_path / "demo" / "int4-default" / "finished.json").unlink()
    assert demo.main(args) == 1 and [Path(path).name for path in trained] == ["int4-default"]
    assert demo.main(demo.DemoArguments(output_dir=args.output_dir, steps=2)) == len(demo.RUNS)


@pytest.mark.parametrize(
    ("name", "after"),
    rest_is_long([("fp8 default", 0.42), ("int4 coupled", 0.5), ("int4 default", 0.2), ("full precision", 0.36)]),
)
def test_demo_that_does_not_show_its_point_fails(tmp_path, monkeypatch, capsys, small, name, after):
    """Each run is judged by itself; another one, which is right, stands for the others."""
    small[name] = after
    other = "fp8 default" if name != "fp8 default" else "int4 coupled"
    monkeypatch.setattr(demo, "RUNS", {run: demo.RUNS[run] for run in (name, other)})
    assert demo.main(demo.DemoArguments(output_dir=str(tmp_path), steps=1)) == 1
    printed = capsys.readouterr().out
    assert f"The point is not shown: {name} ended otherwise" in printed and demo.SHOWN[:20] not in printed


def test_demo_reports_what_failed(tmp_path, monkeypatch, capsys, small):
    real = demo.QuantGRPOTrainer

    def trainer(**kwargs):
        if kwargs["args"].rollout_precision == "int4":
            raise RuntimeError("out of paint")
        return real(**kwargs)

    monkeypatch.setattr(demo, "QuantGRPOTrainer", trainer)
    monkeypatch.setattr(demo, "RUNS", {name: demo.RUNS[name] for name in ("fp8 default", "int4 default")})
    assert demo.main(demo.DemoArguments(output_dir=str(tmp_path), steps=1)) == 1
    printed = capsys.readouterr().out
    assert "out of paint" in printed and "learns" in printed and "The point is not shown: int4 default ended" in printed
    assert (tmp_path / "demo.png").is_file() and (tmp_path / "fp8-default" / "finished.json").is_file()


def test_demo_fresh_starts_over(tmp_path, monkeypatch):
    (tmp_path / "demo" / "fp8-default").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(demo, "RUNS", {})
    monkeypatch.setattr(demo, "plot", lambda *args, **kwargs: None)
    assert demo.main(demo.DemoArguments(output_dir=str(tmp_path / "demo"), fresh=True)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
