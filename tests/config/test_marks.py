"""Marks that a reward needs: each of ours says which, and a run whose completions cannot have them is refused."""

import logging

import pytest
from datasets import Dataset
from jinja2 import UndefinedError
from tiny import save_tiny, tiny_tokenizer
from tokenizers import AddedToken
from training import config, make, spread
from trl import chat_template_utils

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.config.marks import check_marks
from trl_quant.tasks.rewards import MARKS, REWARDS


GRID = "1234\n3412\n2143\n4321"
RIGHT = {  # reward -> a right answer, the columns of its row
    "arithmetic": ("42", {"answer": ["42"]}),
    "countdown": ("3*4", {"nums": [[3, 4]], "target": [12]}),
    "division": ("#### 13;", {"answer": ["13"]}),
    "format": ("42", {}),
    "gsm8k": ("42", {"answer": ["42"]}),
    "strict_math": ("42", {"answer": ["42"]}),
    "sudoku": (GRID, {"puzzle": [GRID.replace("\n", "")]}),
    "think_answer": ("42", {}),
}
WRITTEN = {  # a group of marks -> a completion with them
    (): "{}",
    ("<answer>", "</answer>"): "<answer>{}</answer>",
    (r"\boxed",): r"\boxed{{{}}}",
    ("####",): "#### {}",
    ("####", ";"): "{}",
    ("<think>", "</think>", "<answer>", "</answer>"): "<think>Hm.</think><answer>{}</answer>",
}
NEEDING = [name for name, groups in MARKS.items() if () not in groups]


def test_each_reward_says_which_marks_it_needs():
    """A completion with the marks of one group is worth something, and one that lacks any of them nothing."""
    assert MARKS.keys() == REWARDS.keys() == RIGHT.keys()
    for name, groups in MARKS.items():
        answer, columns = RIGHT[name]
        for marks in groups:
            text = WRITTEN[marks].format(answer)
            assert REWARDS[name]([text], **columns)[0] > 0, (name, marks)
            for mark in marks:
                assert not REWARDS[name]([text.replace(mark, "")], **columns)[0], (name, mark)


def tokenizer_with(template: str = "", special: tuple[str, ...] = ()):
    tokenizer = tiny_tokenizer()
    if template:
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", f"assistant\n{template}")
    if special:
        tokenizer.add_tokens([AddedToken(mark, special=True) for mark in special], special_tokens=True)
    return tokenizer


ASKED = [[{"role": "user", "content": "1+1="}]]


@pytest.mark.parametrize("name", NEEDING)
def test_marks_that_decoding_drops(name):
    """Every group must lack one: another group's marks are enough."""
    reward, groups = REWARDS[name], MARKS[name]
    first = tuple(dict.fromkeys(marks[0] for marks in groups))
    for prompts in (ASKED, ["1+1="]):
        check_marks([reward], tokenizer_with(), prompts, {})
        with pytest.raises(ValueError, match=rf"{reward.__name__} can never be above 0 .*which decoding drops"):
            check_marks([reward], tokenizer_with(special=first), prompts, {})
        if len(first) > 1:
            check_marks([reward], tokenizer_with(special=first[:1]), prompts, {})
    check_marks([spread, REWARDS["gsm8k"]], tokenizer_with(special=first), ASKED, {})


THINKING = "{% if enable_thinking | default(true) %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"


@pytest.mark.parametrize("template", ["<think>\n", "<think>\nOkay, ", "Answer first.\n<think>", THINKING])
def test_a_template_that_opens_the_mark(template):
    """As DeepSeek-R1's and Qwen3-Thinking's do: each right answer would get 0."""
    reward, other = REWARDS["think_answer"], REWARDS["countdown"]
    tokenizer = tokenizer_with(template)
    with pytest.raises(ValueError, match=r"think_answer_reward can never .*'<think>' in the completion"):
        check_marks([spread, reward], tokenizer, ASKED, {})
    check_marks([spread, other], tokenizer, ASKED, {})
    if template == THINKING:  # the template closes it again: the policy may think as it was asked
        check_marks([reward], tokenizer, ASKED, {"enable_thinking": False})


def test_templates_of_models():
    """Of the templates that TRL ships, those whose prompts end inside of `<think>` are refused, and no others."""
    found = {}
    for name, template in vars(chat_template_utils).items():
        if not name.endswith("_chat_template") or not isinstance(template, str):
            continue
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        try:
            asked = tokenizer.apply_chat_template(ASKED[0], tokenize=False, add_generation_prompt=True)
        except UndefinedError:  # it needs a token that this tokenizer lacks
            continue
        found[name] = "</think>" not in asked.rpartition("<think>")[2] and "<think>" in asked
        try:
            check_marks([REWARDS["think_answer"]], tokenizer, ASKED, {})
        except ValueError as error:
            assert found[name] and "opens itself" in str(error), name
        else:
            assert not found[name], name
    assert found["deepseek_r1_distill_chat_template"] and not found["qwen3_chat_template"]
    assert sum(found.values()) > 5 and len(found) - sum(found.values()) > 5


def test_a_prompt_that_opens_the_mark():
    """A plain one by its end; one that only mentions the mark opens nothing, nor do some among others."""
    reward = REWARDS["think_answer"]
    for fine in (["Write <think> and </think>. 1+1="], ["1+1= <think>", "2+2="]):
        check_marks([reward], tokenizer_with(), fine, {})
    with pytest.raises(ValueError, match="opens itself"):
        check_marks([reward], tokenizer_with(), ["1+1=\n<think>\n", "2+2=\n<think>"], {})


def test_a_response_format_that_takes_the_mark():
    """TRL parses completions by it, and the reward reads what is left."""
    tokenizer = tokenizer_with()
    tokenizer.response_template = chat_template_utils.qwen3_template
    with pytest.raises(ValueError, match="which decoding drops from a completion: it is a special token, or part of"):
        check_marks([REWARDS["think_answer"]], tokenizer, ASKED, {})
    check_marks([REWARDS["countdown"]], tokenizer, ASKED, {})


def test_the_run_refuses_it_before_loading(tmp_path, monkeypatch):
    """The trainer, and the command with and without `--dry_run`; with the reward of another format it starts."""
    from trl_quant.cli import main

    model = save_tiny(tmp_path / "model")
    tokenizer_with("<think>\n").save_pretrained(model)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    argv = ["train", "--model_name_or_path", model, "--dataset_name", str(data), "--use_cpu", "true", "--bf16", "false"]
    argv += ["--report_to", "none", "--output_dir", str(tmp_path / "out"), "--reward_funcs"]

    def loaded(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)
    for dry in ([], ["--dry_run", "true"]):
        with pytest.raises(SystemExit, match="think_answer_reward can never be above 0 in this run"):
            main([*argv, "gsm8k", "think_answer", *dry])
    main([*argv, "gsm8k", "--dry_run", "true"])
    chats = Dataset.from_dict({"prompt": ASKED * 8})
    args = config(QuantGRPOConfig, tmp_path / "out")
    given = {"train_dataset": chats, "processing_class": tokenizer_with("<think>\n")}
    with pytest.raises(ValueError, match="can never be above 0"):
        make(QuantGRPOTrainer, args, model=model, reward_funcs=REWARDS["think_answer"], **given)


def test_a_users_reward_of_zeros_is_told_once(tmp_path, caplog):
    def nothing(completions, **kwargs):
        return [0.0] * len(completions)

    async def nothing_awaited(completions, **kwargs):
        return [None if index else 0 for index in range(len(completions))]

    def absent(completions, **kwargs):
        return [None] * len(completions)

    args = config(QuantGRPOConfig, tmp_path, max_steps=2)
    trainer = make(QuantGRPOTrainer, args, reward_funcs=[spread, nothing, nothing_awaited, absent])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "of the first generation" in record.getMessage()]
    assert ["'nothing' gave 0 to each of the 8" in told[0], "'nothing_awaited' gave 0 to each of the 1" in told[1]]
    assert len(told) == 2
