"""Streams as datasets: what a `Dataset` is refused for before the run, a stream is refused for when it is drawn."""

import logging
from contextlib import nullcontext

import pytest
import torch
from asynchronous import asynchronous, given_samples, noted
from datasets import Dataset, IterableDataset
from refusals import ACCEPTED_DATA, REFUSED_DATA
from training import PROMPTS, metrics, parameters, spread
from turns import build, note

from trl_quant.config.lengths import Context
from trl_quant.trainers import checks
from trl_quant.trainers.launch import TRAINERS


NOT_HERE = ("diffusion", "async_grpo")  # the loop of the one is GRPO's, and the other samples in a thread
# Prompts that are texts, of which a generation takes two; no tools
PLAIN = {"max_completion_length": 8, "per_device_train_batch_size": 8, "num_generations": 4}


def stream(rows, times: int | None = None) -> IterableDataset:
    """A stream whose columns nobody knows, which gives its rows so many times; `None` for any number of times."""
    reads = []

    def generate():
        reads.append(1)
        if times is None or len(reads) <= times:
            yield from rows

    return IterableDataset.from_generator(generate)


def rows(count: int) -> list[dict]:
    return [{"prompt": PROMPTS[i % len(PROMPTS)]} for i in range(count)]


def trainer_on(path, data, kind="grpo", given=None, **settings):
    options = {"train_dataset": data} | ({} if kind == "distillation" else {"reward_funcs": spread}) | (given or {})
    return build(path, kind, options, **PLAIN | settings)


@pytest.mark.parametrize("kind", [kind for kind in TRAINERS if kind not in NOT_HERE])
def test_a_stream_that_ends_before_the_first_step(tmp_path, kind):
    """Today's TRL returns from `train` as if it had trained. In distillation a generation takes eight prompts."""
    for count in (0, 1):
        trainer = trainer_on(tmp_path, stream(rows(count)), kind)
        before = parameters(trainer)
        with pytest.raises(ValueError, match="ended before a step: the run took none of its 1 steps"):
            trainer.train()
        assert all(torch.equal(before[name], param) for name, param in parameters(trainer).items())
    trainer = trainer_on(tmp_path, stream(rows(8)), kind)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_stream_that_ends_later(tmp_path, caplog):
    """It is read again as transformers does, and that is told once; with nothing to read again, the run ends."""
    ended = "ended after step 1 of `max_steps`=3. It is read again"
    for times, steps in ((None, 3), (1, 1)):
        caplog.clear()
        trainer = trainer_on(tmp_path, stream(rows(2), times), max_steps=3)
        with caplog.at_level(logging.WARNING):
            trainer.train()
        assert trainer.state.global_step == steps and caplog.text.count(ended) == 1
    caplog.clear()
    trainer_on(tmp_path, stream(rows(6)), max_steps=3).train()
    assert "It is read again" not in caplog.text


def prompts_of(samples) -> list[str]:
    """The prompt of each group, by its number."""
    return [prompt for _, prompt in sorted({sample.group_id: sample.prompt for sample in samples}.items())]


@pytest.mark.parametrize("kind", [stream, Dataset.from_list])
def test_a_thread_reads_again_from_the_beginning(tmp_path, caplog, kind):
    """Each row in its turn, in a resumed run behind what was trained on. TRL begins a stream anew there."""
    data, saving = kind(rows(4)), {"save_strategy": "steps", "save_steps": 3}
    turns = [row["prompt"] for row in rows(4)] * 20
    assert len({*turns}) == 4
    first = asynchronous(tmp_path, data=data, max_steps=3, **saving)
    samples = noted(first.sampling_thread.rollout_buffer)
    with caplog.at_level(logging.WARNING):
        first.train()
    given = prompts_of(samples)
    assert len(given) > 4 and given == turns[: len(given)]
    assert caplog.text.count("ended after step") == (kind is stream)
    again = asynchronous(tmp_path, model=first.model.name_or_path, data=data, max_steps=4, **saving)
    samples = noted(again.sampling_thread.rollout_buffer)
    again.train(resume_from_checkpoint=True)
    given, behind = prompts_of(samples), again.sampling_thread.first_row
    assert behind % 4 and given == turns[behind : behind + len(given)]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (stream([]), "gives no rows."),
        (stream(rows(2), 1), "gives no rows a second time"),
        (stream([*rows(2), {"prompt": None}]), "`train_dataset`, at step 0: the prompt None"),
        (stream(rows(2)), r"missing a required argument: 'answer'\. With `train_dataset` it gets"),
    ],
)
def test_a_thread_ends_at_a_bad_stream(tmp_path, data, fault):
    reward = needs_answer if "'answer'" in fault else spread
    trainer = asynchronous(tmp_path, data=data, rewards=reward, max_steps=9, max_staleness=9)
    with pytest.raises(RuntimeError, match=f"Sampling beside the training failed: .*{fault}"):
        trainer.train()


def test_a_thread_ends_at_a_prompt_that_fills_the_context(tmp_path, monkeypatch, caplog):
    data = stream([*rows(3), {"prompt": "1" * 30}])
    for tokens, refused in ((20, True), (31, False)):
        context = Context(tokens, "the server's `--max-model-len`", True)
        monkeypatch.setattr(checks, "context_of", lambda *given, context=context: context)
        trainer = asynchronous(tmp_path, data=data, max_steps=3, max_staleness=9)
        fault = r"at step \d has a prompt of 30 tokens.*in the server's `--max-model-len`=20"
        with pytest.raises(RuntimeError, match=fault) if refused else nullcontext():
            trainer.train()
    assert caplog.text.count("prompts that leave less than") == 1


def test_trls_worker_takes_streams(tmp_path):
    trainer = asynchronous(tmp_path, given_samples(), data=stream(rows(3)), max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.spec.sampler is None


def as_rows(dataset: Dataset) -> list[dict]:
    return [dataset[i] for i in range(len(dataset))]


def test_rows_that_a_dataset_is_refused_for(tmp_path):
    """Each dataset that is refused before the run, as rows that a run draws, in training and in evaluation."""
    trainer = trainer_on(tmp_path, stream(rows(8)))
    small = [(data, says) for data, says in REFUSED_DATA if isinstance(data, Dataset) and 0 < len(data) < 10]
    refused = [(as_rows(data), says) for data, says in small]
    assert len(refused) >= 10
    for name, mode in (("train_dataset", True), ("eval_dataset", False)):
        trainer.model.train(mode)
        for drawn, says in refused:
            with pytest.raises(ValueError, match=f"`{name}`, at step 0") as error:
                trainer._generate_and_score_completions(drawn)
            fault = says.rpartition(":")[2].rpartition(" row ")[2].partition(" ")[2] if " row " in says else ""
            assert fault in str(error.value)
    for data in ACCEPTED_DATA:
        trainer.drawn_rows.check(as_rows(data)[:8])


@pytest.mark.parametrize("bad", [{}, {"prompt": ""}, {"prompt": None}, {"prompt": 1}, {"text": "a"}])
def test_a_run_ends_at_a_bad_row(tmp_path, bad):
    good = {**dict.fromkeys(bad), "prompt": "1+1="}
    trainer = trainer_on(
        tmp_path, stream([good, good, bad or {"x": 1}, bad or {"x": 1}]), max_steps=2, shuffle_dataset=False
    )
    with pytest.raises(ValueError, match="`train_dataset`, at step 1"):
        trainer.train()


def test_texts_in_a_run_with_tools(tmp_path):
    """As a dataset of them is refused before the run; in an evaluation too."""
    trainer = build(tmp_path, "grpo", {"train_dataset": stream(rows(8)), "tools": [note]})
    with pytest.raises(ValueError, match="`train_dataset`, at step 0, has texts as prompts"):
        trainer.train()
    with pytest.raises(ValueError, match="`eval_dataset`, at step 0, has texts as prompts"):
        trainer.evaluate(Dataset.from_list(rows(2)))


def needs_answer(completions, answer, **kwargs):
    return spread(completions)


def test_columns_that_a_reward_reads(tmp_path):
    trainer = trainer_on(tmp_path, stream(rows(8)), given={"reward_funcs": needs_answer})
    with pytest.raises(ValueError, match=r"missing a required argument: 'answer'\. With `train_dataset` it gets"):
        trainer.train()
    answered = [row | {"answer": "2"} for row in rows(8)]
    for data in (Dataset.from_list(rows(8)), IterableDataset.from_generator(lambda: iter(()), features=FEATURES)):
        for given in (data, {"hard": data}):
            options = {"reward_funcs": needs_answer, "eval_dataset": given}
            with pytest.raises(ValueError, match=r"'answer'\. With `eval_dataset"):
                trainer_on(tmp_path, stream(answered), given=options)
    trainer_on(tmp_path, stream(answered), given={"reward_funcs": needs_answer}).train()


FEATURES = Dataset.from_list(rows(1)).features


def test_streams_to_evaluate_on(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    for bad in (stream([]), {"hard": stream(rows(2)), "none": stream([])}):
        trainer = trainer_on(tmp_path, stream(rows(8)), given={"eval_dataset": bad}, **settings)
        with pytest.raises(ValueError, match="`eval_dataset` ended before its first row"):
            trainer.train()
    trainer = trainer_on(tmp_path, stream(rows(8)), given={"eval_dataset": {"some": stream(rows(2))}}, **settings)
    trainer.train()
    assert any("eval_reward" in log for log in metrics(trainer))
    assert "eval_reward" in trainer.evaluate(stream(rows(2)))
    for bad, says in (
        (stream([]), "ended before its first row"),
        (Dataset.from_dict({"prompt": []}), "`eval_dataset` is empty"),
        (Dataset.from_dict({"prompt": ["a", ""]}), "`eval_dataset`: the prompt of row 1 is empty"),
        (stream([{"prompt": ""}] * 2), "`eval_dataset`, at step 1: the prompt '' is empty"),
        (rows(2), "`eval_dataset` is a list"),
        ({}, "`eval_dataset`={} has no dataset"),
    ):
        with pytest.raises(ValueError, match=says):
            trainer.evaluate(bad)


@pytest.mark.parametrize("bad", [{}, {"a": [1]}, "a", 3])
def test_what_is_no_dataset_to_evaluate_on(tmp_path, bad):
    with pytest.raises(ValueError, match="`eval_dataset"):
        trainer_on(tmp_path, stream(rows(8)), given={"eval_dataset": bad})


def test_streams_are_not_dispatched(tmp_path):
    settings = {"accelerator_config": {"dispatch_batches": True}}
    for given in ({"train_dataset": stream(rows(8))}, {"eval_dataset": {"a": stream(rows(8))}}):
        with pytest.raises(ValueError, match="require `dispatch_batches=False`"):
            trainer_on(tmp_path, Dataset.from_list(rows(8)), given=given, **settings)
