"""The questions of `trl-quant eval`: those of the hub, of files, and generated ones."""

from datasets import Dataset
from known_model import write

import trl_quant.tasks.benchmarks as benchmarks
from trl_quant.tasks.benchmarks import BENCHMARKS, BOXED, load_questions


def test_the_hubs_datasets_are_what_is_documented(monkeypatch):
    """Each with its split, its columns and its instruction; and the table of the module's docstring."""
    loaded = {}

    def load_dataset(source, config=None, split=None):
        row = {"question": "1+1?", "solution": "#### 3"}
        if source in ("HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024", "math-ai/aime25"):
            row["problem"] = row.pop("question")
        row |= {"final_answer": ["$2$"]} if source == "math-ai/olympiadbench" else {"answer": "2"}
        loaded[source] = split
        return Dataset.from_list([row] * 3)

    monkeypatch.setattr("trl_quant.tasks.data.load_dataset", load_dataset)
    for task, benchmark in BENCHMARKS.items():
        if benchmark.source is None:
            continue
        rows = load_questions(task, count=2)
        assert rows["prompt"] == [f"1+1?\n\n{BOXED}"] * 2 and rows.column_names == ["prompt", "answer"]
        assert benchmark.reward([r"\boxed{2}", r"\boxed{3}"], **rows.remove_columns("prompt")[:]) == [1, 0]
        assert f"| {task} | {benchmark.source} | {loaded[benchmark.source]} |" in benchmarks.__doc__
    assert len(loaded) == 7


def test_questions_from_files(tmp_path):
    rows = [{"question": f"{i}?", "answer": f"so #### {i}", "level": i} for i in range(3)]
    path = write(tmp_path / "q.jsonl", *rows)
    found = load_questions("gsm8k", path, 2, instruction="Think.")
    assert found.to_list() == [{"prompt": f"{i}?\n\nThink.", "answer": f"so #### {i}"} for i in range(2)]
    assert load_questions("gsm8k", path, instruction="")["prompt"] == ["0?", "1?", "2?"]
    chat = write(tmp_path / "c.jsonl", {"prompt": [{"role": "user", "content": "1?"}], "answer": "1"})
    assert load_questions("jsonl", chat)[0]["prompt"] == [{"role": "user", "content": "1?"}]
    hand = write(tmp_path / "h.jsonl", {"prompt": "make 6", "nums": [2, 3], "target": 6})
    assert load_questions("countdown", hand).to_list() == [{"prompt": "make 6", "nums": [2, 3], "target": 6}]
    for task in ("countdown", "sudoku", "arithmetic"):
        rows = load_questions(task, count=5, seed=3)
        assert rows.to_list() == load_questions(task, count=7, seed=3).to_list()[:5]
