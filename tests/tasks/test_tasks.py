"""Prompts from files, the arithmetic problems, and the accuracy on them."""

import json
import math
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from places import WORD_PROBLEMS
from scores import arithmetic
from tiny import tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from trl_quant.tasks import division_reward, load_prompts
from trl_quant.tasks.arithmetic import OPERATIONS, Division, Problem, divisions, problems
from trl_quant.tasks.benchmarks import generate
from trl_quant.tasks.data import check_prompts, token_ids
from trl_quant.tasks.evaluate import mean_reward


# Prompts


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_from_gsm8k_format():
    dataset = load_prompts(str(WORD_PROBLEMS))
    assert dataset.column_names[0] == "prompt" and "answer" in dataset.column_names
    assert dataset[0]["prompt"].startswith("A baker") and dataset[0]["answer"].endswith("#### 22")
    assert load_prompts(str(WORD_PROBLEMS), split="train[:3]")["prompt"] == dataset["prompt"][:3]
    assert load_prompts(WORD_PROBLEMS)["prompt"][:] == dataset["prompt"][:]
    assert load_prompts(str(WORD_PROBLEMS), split="test")["prompt"] == dataset["prompt"][:]


def test_prompts_become_conversations_with_a_chat_template(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "1+1=", "answer": "2", "level": 3})
    tokenizer = tiny_tokenizer()
    chat = load_prompts(path, tokenizer=tokenizer)
    assert chat[0] == {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "level": 3}
    tokenizer.chat_template = None
    assert (
        load_prompts(path, tokenizer=tokenizer)[0]
        == load_prompts(path)[0]
        == {"prompt": "1+1=", "answer": "2", "level": 3}
    )
    path = write(tmp_path / "e.json", {"prompt": [{"role": "system", "content": "Be brief."}]})
    assert load_prompts(path, tokenizer=tiny_tokenizer())[0]["prompt"] == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer()])
@pytest.mark.parametrize("prompts", [["1+1=", None], [None, "1+1="], ["1+1=", ""], [7, 8]])
def test_an_instruction_hides_no_malformed_prompt(prompts, tokenizer, tmp_path):
    """It would follow the text None."""
    path = write(tmp_path / "d.jsonl", *({"prompt": prompt} for prompt in prompts))
    with pytest.raises(ValueError, match=r"the prompt of row .* (is missing|is empty|is a int|without content)"):
        check_prompts("train_dataset", load_prompts(path, tokenizer=tokenizer, instruction="Think."))


def test_an_instruction_follows_no_conversation_in_any_row(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "1+1="}]})
    with pytest.raises(ValueError, match="`instruction` cannot follow"):
        load_prompts(path, instruction="Think.")


def test_texts_and_conversations_are_not_mixed(tmp_path):
    """TRL would end at the first generation: it takes all prompts to be like the first."""
    rows = [{"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "1+1="}]}]
    for name, order in (("d", rows), ("e", rows[::-1])):
        path = write(tmp_path / f"{name}.jsonl", *order)
        with pytest.raises(ValueError, match=r"the prompt of row 1 is a \w+, and the first is a \w+"):
            check_prompts("train_dataset", load_prompts(path))


def test_parquet_and_csv_files(tmp_path):
    """`datasets` would look for them on the hub."""
    rows = Dataset.from_dict({"question": ["1+1=", "2 + 2 = é"], "answer": ["two", "four"]})
    rows.to_parquet(tmp_path / "d.parquet")
    rows.to_csv(tmp_path / "d.csv")
    for name in ("d.parquet", "d.csv"):
        loaded = load_prompts(tmp_path / name, split="test[:1]")
        assert loaded[:] == {"prompt": ["1+1="], "answer": ["two"]}
        assert load_prompts(tmp_path / name)["prompt"] == rows["question"]
        with pytest.raises(ValueError, match=r"nowhere\.d\.\w+.*no such file"):
            load_prompts(tmp_path / f"nowhere.{name}")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "d.txt").write_text("1+1=")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    (tmp_path / "blank.jsonl").write_text("\n\n")
    path = write(tmp_path / "d.jsonl", {"prompt": "1+1="})
    for file, split, says in (
        ("d.txt", "train", r"must end in \.json, \.jsonl, \.parquet, \.csv"),
        ("latin.jsonl", "train", "cannot be read: .*UTF-?8"),
        ("blank.jsonl", "train", "cannot be read: .*(no data|Expected object)"),  # the latter: datasets 4.7
        (path, "train[:x]", "cannot be read: "),
        (path, "train[:0]", "cannot be read: "),
    ):
        with pytest.raises(ValueError, match=f"{Path(file).name}.*{says}"):
            load_prompts(tmp_path / file, split=split)


def test_datasets_without_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"text.*label.*'prompt' or 'question'"):
        load_prompts(write(tmp_path / "d.jsonl", {"text": "1+1=", "label": "2"}))
    with pytest.raises(ValueError, match=r"nowhere\.jsonl.*no such file"):
        load_prompts(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="empty"):
        load_prompts(write(tmp_path / "empty.jsonl"))


def test_hub_configuration_is_filled_in(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Dataset.from_dict({"question": ["1+1"], "answer": ["#### 2"]})

    monkeypatch.setattr("trl_quant.tasks.data.load_dataset", load_dataset)
    load_prompts("openai/gsm8k")
    load_prompts("openai/gsm8k", "test", config="socratic")
    load_prompts("someone/else")
    assert calls == [
        (("openai/gsm8k", "main"), {"split": "train"}),
        (("openai/gsm8k", "socratic"), {"split": "test"}),
        (("someone/else", None), {"split": "train"}),
    ]


# Arithmetic


@pytest.mark.parametrize(
    ("problem", "solution"),
    [
        (Problem(347, "+", 588), "7+8+0=5c1 4+8+1=3c1 3+5+1=9c0 #### 935"),
        (Problem(904, "-", 88), "4-8-0=6b1 0-8-1=1b1 9-0-1=8b0 #### 816"),
        (Problem(47, "*", 6), "7*6+0=2c4 4*6+4=8c2 #### 282"),
        (Problem(99, "+", 1), "9+1+0=0c1 9+0+1=0c1 #### 100"),
    ],
)
def test_solutions(problem, solution):
    assert problem.solution == solution


def replay(problem: Problem) -> int:
    """The number that the written steps alone give, digit by digit: an independent reading of the trace."""
    steps, _, _ = problem.solution.partition(" #### ")
    written, carry = [], 0
    for step in steps.split(" "):
        left, right = step.split("=")
        first, other, carry_in = (int(c) for c in left if c.isdigit())
        assert carry_in == carry
        digit, carry = int(right[0]), int(right[2])
        value = {"+": first + other + carry_in, "-": first - other - carry_in, "*": first * other + carry_in}[
            problem.op
        ]
        assert value == digit + 10 * carry * (-1 if problem.op == "-" else 1)
        written.append(digit)
    return int("".join(map(str, [carry, *reversed(written)])))


def test_problems():
    sample = list(islice(problems(0), 1000))
    assert sample == list(islice(problems(0), 1000))
    assert sample != list(islice(problems(1), 1000))
    for problem in sample:
        assert eval(problem.prompt.rstrip("=")) == problem.answer == replay(problem)
        assert problem.answer >= 0
        assert arithmetic(problem.solution, problem.answer, prompts=[problem.prompt]) == 1.0
    for problem in islice(problems(0, min_digits=1, max_digits=1), 1000):  # where 8-4 and 4-0 would be frequent
        assert problem.answer not in (problem.a, problem.b)
    counts = [sum(p.op == op for p in sample) for op in OPERATIONS]
    assert min(counts) > 290
    for other, problem in pairwise(sample):
        if other.answer != problem.answer:
            assert arithmetic(other.solution, problem.answer) == 0.0


def test_held_out_problems_are_never_taught():
    with pytest.raises(ValueError, match=r"operations.*'/'.*'\*'"):
        next(problems(0, operations="+/"))
    assert {p.op for p in islice(problems(0, operations="+-"), 100)} == {"+", "-"}
    taught, held_out = (set(islice(problems(0, max_digits=2, held_out=h), 3000)) for h in (False, True))
    assert taught and held_out and not taught & held_out


@pytest.mark.parametrize(
    ("difficulty", "says"),
    [
        ({"min_digits": 5, "max_digits": 2}, "`min_digits`=5, `max_digits`=2: they must be from 1 to 63, in order"),
        ({"max_digits": 64}, "`min_digits`=2, `max_digits`=64: they must be from 1 to 63, in order"),
        ({"min_digits": 5}, "`min_digits`=5, `max_digits`=4: they must"),
        ({"min_digits": 0}, "`min_digits`=0, `max_digits`=4: they must"),
        ({"operations": 5}, "`operations`=5 must be a list of at least one of '+', '-', '*'"),
        ({"operations": None}, "`operations`=None must"),
        ({"operations": {"+": 1}}, "`operations`={'+': 1} must"),
        ({"operations": []}, "`operations`=[] must"),
        ({"operations": [["+"]]}, "`operations` has [['+']]. Allowed: '+', '-', '*'"),
    ],
)
def test_the_difficulty_of_problems_is_checked(difficulty, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        generate("arithmetic", 4, **difficulty)


def test_the_narrowest_difficulty_of_problems():
    rows = generate("arithmetic", 4, min_digits=3, max_digits=3, operations=["-"])
    assert all(re.fullmatch(r"\d{3}-\d{3}=", prompt) for prompt in rows["prompt"])


def test_the_reward_reads_the_longest_answers():
    for problem in islice(problems(0, min_digits=63, max_digits=63), 100):
        assert arithmetic(problem.solution, problem.answer) == 1.0


def test_divisions():
    with pytest.raises(ValueError, match=r"min_quotient`=3, `max_quotient`=2.*at least 1, in order"):
        next(divisions(0, 3, 2))
    sample = list(islice(divisions(0, 2, 24), 200))
    assert sample == list(islice(divisions(0, 2, 24), 200)) != list(islice(divisions(1, 2, 24), 200))
    assert {division.a // division.b for division in sample} == set(range(2, 25))
    for division in sample:
        assert division.prompt == f"{division.a}%{division.b}=" and 10 <= division.b <= 99
        *others, remainder = map(int, division.row["answer"].split(";"))
        assert [*others, remainder] == [division.a - (i + 1) * division.b for i in range(division.a // division.b)]
        assert remainder == eval(division.prompt.rstrip("="))
        assert [replay(problem) for problem in division.problems] == [*others, remainder]
        assert division_reward([division.solution], [division.row["answer"]]) == [1.0]
    assert Division(130, 57).solution == (
        "130-57=0-7-0=3b1 3-5-1=7b1 1-0-1=0b0 #### 73;73-57=3-7-0=6b1 7-5-1=1b0 #### 16;"
    )
    taught, held_out = (set(islice(divisions(0, 1, 4, held_out=h), 3000)) for h in (False, True))
    assert taught and held_out and not taught & held_out


def test_a_division_is_scored_difference_by_difference():
    division = Division(200, 57)
    answer = [division.row["answer"]]
    assert answer == ["143;86;29"] and division_reward([division.direct_solution], answer) == [1.0]
    first, second, third = division.direct_solution.split(";")[:-1]
    slip = Division(210, 57).direct_solution.partition(";")[2]  # 10 too much in the first answer, and right from there
    assert division_reward([f"200-57=#### 153;{slip}"], answer) == [0]
    assert division_reward([f"{first};{second}0;{third};"], answer) == [2 / 3]
    assert division_reward([f"{second};{first};{third};"], answer) == [1 / 3]  # each in its place
    assert division_reward([f"{first};{second};{third}"], answer) == [2 / 3]  # the last one may have been cut
    assert division_reward([f"{first};{second};"], answer) == [2 / 3]
    assert division_reward([";".join(answer) + ";", "", division.prompt], answer * 3) == [0, 0, 0]
    for more, share in ((third, 3 / 4), (f"{third};", 3 / 4), (";;", 3 / 5), (f"{third};" * 3, 3 / 6)):
        assert division_reward([division.direct_solution + more], answer) == [share]


# Accuracy


def test_mean_reward_samples_the_model():
    """At temperature 1 a token's share is its probability; at temperature 0 the likeliest token is always taken."""
    model, tokenizer = tiny_model("qwen3", tied=False, seed=1), tiny_tokenizer()
    prompt, x = tokenizer("1+1=", return_tensors="pt"), tokenizer("x")["input_ids"][0]
    with torch.no_grad():
        hidden = model.model(prompt["input_ids"]).last_hidden_state[0, -1]
        logits = model.lm_head(hidden)
        logits[x] = -torch.inf
        model.lm_head.weight[x] = hidden / hidden.square().sum() * logits.logsumexp(-1)
        p = model(**prompt).logits[0, -1].softmax(-1)
    assert p[x].item() == pytest.approx(0.5, abs=1e-4) and p.argmax() == x
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 2000, "answer": ["x"] * 2000})

    def is_answer(completions, answer, prompts):
        assert prompts == ["1+1="] * len(completions)
        return [float(completion == gold) for completion, gold in zip(completions, answer, strict=True)]

    state = torch.get_rng_state()
    sampled = mean_reward(model, tokenizer, dataset, is_answer, max_new_tokens=1, batch_size=1000)
    assert torch.equal(torch.get_rng_state(), state)
    assert sampled == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 2000))
    model.generation_config.update(repetition_penalty=9.0, min_p=0.9, top_k=1, top_p=0.1, temperature=0.1)
    assert mean_reward(model, tokenizer, dataset, is_answer, max_new_tokens=1, batch_size=1000) == sampled
    few = dataset.select(range(4))
    assert mean_reward(model, tokenizer, few, is_answer, max_new_tokens=1, temperature=0) == 1.0
    assert mean_reward(model, tokenizer, few, lambda **_: [None, 1.0, 0.0, None], max_new_tokens=1) == 0.5


def test_mean_reward_asks_as_the_trainer_does(monkeypatch):
    """A chat template writes its own first token, and the tokenizer must not add another."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[first])
    asked = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.append(given["input_ids"]) or generate(**given))
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]]})
    mean_reward(model, tokenizer, dataset, lambda completions, **_: [0.0] * len(completions), max_new_tokens=1)
    assert asked[0].tolist() == token_ids(dataset["prompt"][:], tokenizer)
    assert asked[0][0].tolist().count(first[1]) == 2  # of the user, and of the assistant


def test_mean_reward_does_not_depend_on_the_batch():
    model, tokenizer = tiny_model("qwen3", seed=1), tiny_tokenizer()
    dataset = Dataset.from_dict({"prompt": ["1+1=", "What is 7 times 6?"]})
    seen = []
    for batch_size in (1, 2):
        completions = []
        reward = lambda completions, prompts, to=completions: to.extend(completions) or [0.0] * len(prompts)  # noqa: E731
        mean_reward(model, tokenizer, dataset, reward, max_new_tokens=8, temperature=0, batch_size=batch_size)
        seen.append(completions)
    assert seen[0] == seen[1] and len(set(seen[0])) == 2
