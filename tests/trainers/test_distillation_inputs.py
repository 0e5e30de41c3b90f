"""Distillation: tools, what is refused before a model is loaded, what it says of itself, and its example."""

import re
import time

import pytest
from distilling import distil
from reference import diagnostics
from tiny import VOCAB_SIZE, gpt2, save_tiny
from training import config, metrics, scored_batches, teacher
from turns import calling_tokenizer, conversations, note

from trl_quant import QuantDistillationConfig
from trl_quant.corrections import CORRECTIONS
from trl_quant.rollout.trl_face import Turn
from trl_quant.trainers.recorded import logps_of_turns


pytestmark = pytest.mark.isa


# Tools


def with_tools(path, turns: int, tool=note, **settings):
    """A run whose completions take `turns` turns of at most four tokens."""
    settings = {"max_completion_length": 160, "max_tool_calling_iterations": turns - 1, "max_steps": 1} | settings
    given = {"tools": [tool], "processing_class": calling_tokenizer(), "train_dataset": conversations(64)}
    return distil(path, generation_kwargs={"max_new_tokens": 4}, **given, **settings)


def test_each_turn_is_heard(tmp_path):
    """
    The sampler's log-probabilities stand on the tokens that it drew, in each of three turns: an engine with the
    policy's own weights has the policy's. What tools wrote counts nowhere, and its ratio is in no prefix.
    """
    trainer = with_tools(tmp_path, 3, rollout_precision="int4", is_correction="tis", is_cap=1.05)
    batches, weighed = scored_batches(trainer), []
    write = trainer.correction_step.write_into_open_batch

    def noted(logps):
        write(logps)
        weighed.append(dict(trainer.correction_step.open_batch))

    trainer.correction_step.write_into_open_batch = noted
    trainer.train()
    (batch,), (open_batch,), log = batches, weighed, metrics(trainer)[0]
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert 0 < mask.sum() < batch["completion_mask"].sum() and log["tools/call_frequency"] == 2
    sampled, pi = open_batch["sampling_per_token_logps"], open_batch["old_per_token_logps"]
    assert sampled[mask == 1].isfinite().all() and sampled[(open_batch["tool_mask"] == 0)].isnan().all()
    assert (pi - sampled)[open_batch["tool_mask"] * open_batch["completion_mask"] == 1].abs().max() < 2
    expected = diagnostics(sampled, pi, open_batch["completion_mask"] * open_batch["tool_mask"])
    by_turn = [name for name in expected if "by_turn" in name]
    assert by_turn == ["mismatch/by_turn/1", "mismatch/by_turn/2", "mismatch/by_turn/3-4"]
    for name in (*by_turn, "mismatch/kl_k3"):
        assert log[name] == pytest.approx(expected[name], rel=1e-4), name
    for row, weights in enumerate(open_batch["importance_sampling_ratio"]):
        product = 1.0
        for t in range(len(weights)):
            if open_batch["completion_mask"][row, t] and open_batch["tool_mask"][row, t]:
                assert weights[t].item() == pytest.approx(min(product, 1.05), rel=1e-4)
                product *= (pi[row, t] - sampled[row, t]).exp().item()
            else:
                assert weights[t] == 1


def test_rows_that_went_on_get_their_turns():
    """Two rows with the same prompt, and one that ended; TRL has cut the last turn of the second."""
    prompts, tool = [[1, 2], [1, 2], [3]], [8, 9]
    turns = [Turn(prompts, [[-0.1, -0.2], [-0.3, -0.4], [-0.5]])]
    first = [[4, 5], [4, 5], [6]]
    turns.append(Turn([prompts[row] + first[row] + tool for row in (0, 1)], [[-1.0], [-2.0, -2.5, -2.7]]))
    found = logps_of_turns(turns, prompts, [[4, 5, 8, 9, 7], [4, 5, 8, 9, 7, 7], [6]])
    assert found == [[-0.1, -0.2, None, None, -1.0], [-0.3, -0.4, None, None, -2.0, -2.5], [-0.5]]


def test_a_tool_must_answer_in_time(tmp_path):
    """TRL tells the model of the error, and the run goes on."""

    def sleepy() -> str:
        """Sleeps."""
        time.sleep(30)

    sleepy.__name__ = "note"
    trainer = with_tools(tmp_path, 2, tool=sleepy, rollout_precision="int8", reward_timeout=0.05)
    trainer.train()
    assert metrics(trainer)[0]["tools/failure_frequency"] == 1


# What is refused


def test_exact_rollouts_are_refused():
    settings = {"train_precision": "int8", "exact_rollouts": True, "use_vllm": True, "vllm_mode": "colocate"}
    with pytest.raises(ValueError, match="`exact_rollouts`=True makes sampler and trainer agree"):
        config(QuantDistillationConfig, "unused", **settings)


def test_defaults_of_the_correction():
    given = {name: config(QuantDistillationConfig, "unused", rollout_precision=name) for name in (None, "int8")}
    assert [args.is_correction for args in given.values()] == ["trl", "none"]
    assert given[None].correction() is None and given["int8"].correction() == CORRECTIONS["none"]()
    args = config(QuantDistillationConfig, "unused", gradient_accumulation_steps=3)
    assert (args.steps_per_generation, args.generation_batch_size) == (3, 24)


@pytest.mark.parametrize(
    ("given", "settings", "says"),
    [
        ({"teacher_model": None}, {}, "`teacher_model`=None: name the model that the student learns from"),
        ({"teacher_model": "/nowhere"}, {}, "`teacher_model`='/nowhere' is neither a directory here"),
        (
            {"teacher_model": "small"},
            {},
            f"The student's vocabulary has {VOCAB_SIZE} tokens and the teacher's 256. Distillation compares",
        ),
        (
            {"teacher_model": "itself"},
            {"teacher_precision": "nvfp4"},
            "`teacher_precision`='nvfp4' quantizes the teacher while it loads, and `teacher_model` is loaded already",
        ),
        (
            {"teacher_model": "experts"},
            {"teacher_precision": "nvfp4"},
            "`teacher_precision`='nvfp4', but the teacher is a mixture of 4 experts, which stay in 16 bits here",
        ),
    ],
    ids=str,
)
def test_teachers_are_checked_before_loading(tmp_path, monkeypatch, given, settings, says):
    made = {
        "small": lambda: save_tiny(tmp_path / "small", vocab_size=256, eos_token_id=255, pad_token_id=254),
        "experts": lambda: save_tiny(tmp_path / "experts", "qwen3_moe"),
        "itself": teacher,
    }
    options = {name: made.get(value, lambda value=value: value)() for name, value in given.items()}
    path = save_tiny(tmp_path / "model", seed=3)
    monkeypatch.setattr("trl.trainer.distillation_trainer.create_model_from_path", None)  # loads nothing
    with pytest.raises(ValueError, match=re.escape(says)):
        distil(tmp_path, path, **options, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"teacher_model_revision": "v2"}, "`teacher_model_revision`='v2' acts only while a teacher loads"),
        ({"teacher_model_init_kwargs": {"dtype": "bfloat16"}}, "'bfloat16'} acts only while a teacher loads"),
        ({"teacher_model_name_or_path": "another"}, "`teacher_model_name_or_path`='another', but `teacher_model` is"),
    ],
)
def test_options_of_another_teacher_are_refused(tmp_path, settings, says):
    """Here the teacher is loaded already."""
    with pytest.raises(ValueError, match=re.escape(says)):
        distil(tmp_path, **settings)


def test_a_teacher_without_linear_layers_is_refused(tmp_path):
    gpt2().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no linear layers in its decoder to hold in 'mxfp4'"):
        distil(tmp_path, teacher_precision="mxfp4", teacher_model=str(tmp_path / "gpt2"))


# The example
