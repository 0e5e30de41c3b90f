"""`trl-quant eval` on a masked diffusion model: answers of slow loops, a run's own schedule, and what is refused."""

import re
from dataclasses import replace

import pytest
from known_model import command, result, rows, write
from masked_policy import MASK_ID, policy, tokenizer, trainer
from reference_diffusion import denoised
from tiny import save_tiny
from transformers import TrainingArguments

from trl_quant.cli import main
from trl_quant.rollout.engine import requests_for


QUESTIONS = ["1+1=", "What is 7 times 6?"]


@pytest.fixture(autouse=True)
def fresh_accelerator(tmp_path):
    TrainingArguments(str(tmp_path / "unused"), use_cpu=True, bf16=False).device  # noqa: B018


@pytest.fixture
def model():
    return policy(seed=5)


@pytest.fixture
def argv(model, tmp_path) -> list[str]:
    model.save_pretrained(tmp_path / "model")
    without_template().save_pretrained(tmp_path / "model")
    return command(str(tmp_path / "model"), tmp_path)


def without_template():
    texts = tokenizer()
    texts.chat_template = None
    return texts


def expected(model, length, block, step, temperature=0.0):
    """The text of each question: what slow loops write, up to the first end."""
    ids = tokenizer()(QUESTIONS)["input_ids"]
    canvases, _ = denoised(model, ids, length, block, step, MASK_ID, temperature)
    ends = [row.index(257) if 257 in row else length for row in canvases]
    return [tokenizer().decode(row[:end], skip_special_tokens=True) for row, end in zip(canvases, ends, strict=True)]


def asked(tmp_path, answers, argv):
    data = [{"prompt": question, "answer": answer} for question, answer in zip(QUESTIONS, answers, strict=True)]
    argv[argv.index("--data") + 1] = write(tmp_path / "asked.jsonl", *data)
    return argv


def test_answers_are_denoised(argv, model, tmp_path):
    texts = expected(model, 8, 4, 2)
    schedule = ["--block_length", "4", "--tokens_per_step", "2", "--max_completion_length", "8"]
    argv = asked(tmp_path, ["1", "2"], [*argv, *schedule])
    main(argv)
    assert [row["completion"] for row in rows(tmp_path)] == texts
    found = result(tmp_path)["settings"]
    assert (found["block_length"], found["tokens_per_step"], found["top_p"]) == (4, 2, 1.0)
    assert found["rollout_precision"] == "bf16" and found["mask_token_id"] is None
    other = expected(model, 8, 8, 8)
    assert other != texts  # another schedule would show
    again = [*argv, "--output", str(tmp_path / "other.json"), "--block_length", "8", "--tokens_per_step", "8"]
    main(again)
    assert [row["completion"] for row in rows(tmp_path, "other")] == other


def test_several_answers_are_drawn(argv, tmp_path):
    options = ["--num_samples", "3", "--block_length", "4", "--max_completion_length", "4", "--temperature", "1"]
    main(asked(tmp_path, ["1", "2"], [*argv, *options]))
    texts = [row["completion"] for row in rows(tmp_path)]
    assert len(texts) == 6 and len(set(texts)) > 2 and "avg@3" in result(tmp_path)["metrics"]


def test_a_run_is_evaluated_as_it_was_trained(argv, tmp_path):
    """Its schedule, its canvas and its precision."""
    settings = {"rollout_precision": "int4", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"tokens_per_step": 1, "cache_finished_blocks": True}
    made = trainer(tmp_path / "run", given={"processing_class": without_template()}, **settings)
    made.train()
    argv[1] = str(tmp_path / "run")
    at = argv.index("--max_completion_length")
    argv = asked(tmp_path, ["1", "2"], argv[:at] + argv[at + 2 :])
    main(argv)
    found = result(tmp_path)["settings"]
    names = ("block_length", "tokens_per_step", "cache_finished_blocks", "max_completion_length", "rollout_precision")
    assert tuple(found[name] for name in names) == (4, 1, True, 8, "int4")
    engine = made.vllm_generation.engine
    engine.sync()
    engine.schedule = replace(engine.schedule, temperature=0.0)
    ids = engine.sample(requests_for(tokenizer()(QUESTIONS)["input_ids"])).token_ids
    texts = [tokenizer().decode(row, skip_special_tokens=True) for row in ids]
    assert [row["completion"] for row in rows(tmp_path)] == texts

    switched_off = [*argv, "--no-cache_finished_blocks", "--output", str(tmp_path / "uncached.json")]
    main(switched_off)
    assert result(tmp_path, "uncached")["settings"]["cache_finished_blocks"] is False
    engine.schedule = replace(engine.schedule, cache_finished_blocks=False)
    ids = engine.sample(requests_for(tokenizer()(QUESTIONS)["input_ids"])).token_ids
    uncached = [tokenizer().decode(row, skip_special_tokens=True) for row in ids]
    assert [row["completion"] for row in rows(tmp_path, "uncached")] == uncached != texts
    at_once = ["--tokens_per_step", "4", "--output", str(tmp_path / "at_once.json")]
    with pytest.raises(SystemExit, match=r"`cache_finished_blocks`=True acts only between .* Switch it off, or write"):
        main([*argv, *at_once])
    main([*switched_off, *at_once])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--top_p", "0.9", "--num_samples", "2"], "`--top_p`=0.9: a masked diffusion model is denoised"),
        (["--engine", "vllm"], "`--engine vllm`: a masked diffusion model is denoised by the embedded engine"),
        (["--block_length", "3"], "`block_length`=3 does not divide `max_completion_length`=4"),
        (["--block_length", "0"], "`--block_length`=0 is out of range. It must be >= 1"),
        (["--block_length", "4", "--tokens_per_step", "3"], "`tokens_per_step`=3 does not divide `block_length`=4"),
        ([], "`block_length`=32 does not divide `max_completion_length`=4"),
        (["--block_length", "4", "--mask_token_id", "256"], "`mask_token_id`=256 is also the tokenizer's token"),
    ],
)
def test_what_cannot_act_is_refused(argv, tmp_path, options, says):
    with pytest.raises(SystemExit, match=re.escape(says)):
        main([*argv, *options])


def test_other_models_take_none_of_it(argv, tmp_path):
    save_tiny(tmp_path / "causal", "llama")
    argv[1] = str(tmp_path / "causal")
    for name in ("--block_length", "--tokens_per_step", "--mask_token_id"):
        with pytest.raises(SystemExit, match=f"`{name}` acts only on a masked diffusion model"):
            main([*argv, name, "2"])
    with pytest.raises(SystemExit, match="`--cache_finished_blocks` acts only on a masked diffusion model"):
        main([*argv, "--no-cache_finished_blocks"])
    argv[1] = str(tmp_path / "model")
    with pytest.raises(SystemExit, match="model' is a masked diffusion model, whose tokens have no probability"):
        main(["report", "--mismatch", argv[1], "--output", str(tmp_path / "m.json")])
