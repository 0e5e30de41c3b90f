"""The papers' training data by name, from small local files where `datasets` looks for a dataset's id first."""

import json
from pathlib import Path

import pytest
from tiny import tiny_tokenizer

from trl_quant.tasks import load_prompts, strict_math_reward, think_answer_reward
from trl_quant.tasks.rewards import check_truths


BIGMATH = "open-r1/Big-Math-RL-Verified-Processed"
MATH = "DigitalLearningGmbH/MATH-lighteval"


def store(name: str, configs: dict[str, dict[str, list[dict]]]) -> None:
    """Stores configuration -> split -> rows as a dataset of this id, with the card that names its files."""
    directory, card = Path(name), ["---", "configs:"]
    for config, splits in configs.items():
        card += [f"- config_name: {config}", "  data_files:"]
        (directory / config).mkdir(parents=True)
        for split, rows in splits.items():
            card += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            (directory / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def bigmath(level: int, prompt: str | None = None) -> dict:
    """A row as the processed copy has it."""
    prompt = prompt or f"A question of level {level}"
    return {"prompt": prompt, "solution": rf"\frac{{{level}}}{{7}}", "source": "olympiads", "domain": ["Algebra"]} | {
        "llama8b_solve_rate": 1 - level / 5
    }


def gsm8k(number: int) -> dict:
    return {"question": f"A word problem {number}", "answer": f"It is <<{number}*1={number}>>.\n#### {number}"}


def math(number: int) -> dict:
    solution = rf"We see \boxed{{0}}, no, $\boxed{{\sqrt{{{number}}}}}$."
    return {"problem": f"A competition's {number}", "level": "Level 5", "type": "Algebra", "solution": solution}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A working directory with the datasets in their hub's layout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    levels = {f"level_{level}": [bigmath(level)] for level in range(1, 6)}
    several = {f"level_{'_'.join(map(str, some))}": [bigmath(n) for n in some] for some in ((3, 4, 5), (4, 5))}
    several["level_3_4_5"] += [bigmath(3, "x" * 1024), bigmath(3, "x" * 1025)]
    store(BIGMATH, {name: {"train": rows} for name, rows in (levels | several).items()})
    store("openai/gsm8k", {"main": {"train": [gsm8k(n) for n in range(1, 4)], "test": [gsm8k(9)]}})
    store(MATH, {"default": {"train": [math(n) for n in (2, 3, 5, 6, 7)], "test": [math(10), math(11)]}})


def test_bigmath_has_levels_3_to_5(hub):
    rows = load_prompts("bigmath")
    assert rows["prompt"] == [f"A question of level {level}" for level in (3, 4, 5)] + ["x" * 1024]
    assert rows["answer"][:3] == [r"\frac{3}{7}", r"\frac{4}{7}", r"\frac{5}{7}"]
    assert rows.column_names == ["prompt", "answer", "source"] and set(rows["source"]) == {BIGMATH}
    hard = load_prompts("bigmath", config="level_4_5")
    assert hard["prompt"] == ["A question of level 4", "A question of level 5"]
    assert load_prompts("bigmath", config="level_1")["prompt"] == ["A question of level 1"]
    with pytest.raises(ValueError, match="level_9"):
        load_prompts("bigmath", config="level_9")


def test_gsm8k_and_math_are_mixed_in_the_proportion_of_their_splits(hub):
    rows = load_prompts("gsm8k_math")
    assert rows["source"] == ["openai/gsm8k"] * 3 + [MATH] * 5
    assert rows["prompt"] == [
        *(f"A word problem {n}" for n in (1, 2, 3)),
        *(f"A competition's {n}" for n in (2, 3, 5, 6, 7)),
    ]
    held_out = load_prompts("gsm8k_math", "test")
    assert held_out["prompt"] == ["A word problem 9", "A competition's 10", "A competition's 11"]
    assert load_prompts("gsm8k_math", "train[:2]")["source"] == ["openai/gsm8k"] * 2 + [MATH] * 2
    with pytest.raises(ValueError, match="'gsm8k_math' mixes 2 datasets and takes no configuration, such as 'main'"):
        load_prompts("gsm8k_math", config="main")


def test_one_reward_reads_the_answers_of_both_sources(hub):
    rows = load_prompts("gsm8k_math")
    check_truths(strict_math_reward, rows)
    right = ["1", "2", "3", *(rf"\sqrt{{{n}}}" for n in (2, 3, 5, 6, 7))]
    answers = [rf"\boxed{{{text}}}" for text in right]
    assert strict_math_reward(answers, answer=rows["answer"]) == [1.0] * 8
    assert strict_math_reward([r"\boxed{0}"] * 8, answer=rows["answer"]) == [0.0] * 8


@pytest.mark.parametrize(
    ("name", "source", "rows", "missing"),
    [
        ("bigmath", BIGMATH, {"level_3_4_5": {"train": [{"prompt": "1+1", "answer": "2"}]}}, "'solution'"),
        ("gsm8k_math", MATH, {"default": {"train": [{"question": "1+1"}]}}, "'problem' and 'solution'"),
    ],
)
def test_a_missing_column_is_named(hub, name, source, rows, missing):
    for path in sorted(Path(source).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store(source, rows)
    with pytest.raises(ValueError, match=rf"'{source}' has the columns \[.*it must have {missing} too"):
        load_prompts(name)


def test_an_instruction_follows_each_prompt(hub):
    tokenizer = tiny_tokenizer()
    (row,) = load_prompts("bigmath", "train[:1]", tokenizer=tokenizer, instruction="Think.")
    assert row["prompt"] == [{"role": "user", "content": "A question of level 3\n\nThink."}]
    assert load_prompts("openai/gsm8k", instruction="Think.")["prompt"][2] == "A word problem 3\n\nThink."
    Path("chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1="}]}))
    with pytest.raises(ValueError, match="`instruction` cannot follow prompts that are conversations"):
        load_prompts("chat.jsonl", instruction="Think.")


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("<think>1+1=2</think><answer>2</answer>", True),
        (" <think>\n1 + 1\n= 2 < 3\n</think>\n\n<answer>\n2\n</answer>\n", True),
        ("<think>1+1=2</think> so <answer>2</answer>", False),
        ("Well. <think>1+1=2</think><answer>2</answer>", False),
        ("<think>1+1=2</think><answer>2</answer> Indeed.", False),
        ("<answer>2</answer><think>1+1=2</think>", False),
        ("<think>1+1=2<answer>2</answer></think>", False),
        ("<think>1+1=2</think><answer>2", False),
        ("<think>1+1=2<answer>2</answer>", False),
        ("1+1=2</think><answer>2</answer>", False),
        ("<think></think><answer>2</answer>", False),
        ("<think> \n </think><answer>2</answer>", False),
        ("<think>1+1=2</think><answer> </answer>", False),
        ("<think>1+1=2</think><answer>2</answer><answer>3</answer>", False),
        ("<think>1</think><think>2</think><answer>2</answer>", False),
        ("<think>1<think>2</think><answer>2</answer>", False),
        ("<Think>1+1=2</Think><answer>2</answer>", False),
        ("<think>1+1=2</think>", False),
        ("", False),
        ("<think><think>1+1=2</think> <answer>2</answer>", False),
        ("<think>1+1=2</think> <answer><answer>2</answer>", False),
    ],
)
def test_the_format_of_qerl(completion, is_right):
    message = [{"role": "assistant", "content": completion}]
    assert think_answer_reward([completion, message]) == [0.2 * is_right] * 2
