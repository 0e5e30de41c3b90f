"""What a run says of itself: its first line, what it prints of a step, its model card."""

import ast
import re
import warnings

import pytest
import training
from places import ROOT
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from trl_quant import AISGRPOConfig, AISGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer, __version__
from trl_quant.config.summary import summary
from trl_quant.trainers.console import SelectivePrinter, SelectiveProgress, shown


NUMERICS = "(numerics only, no speed-up)"
VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
SERVER = {"use_vllm": True, "vllm_mode": "server"}

# settings, whether there is an adapter -> the line
LINES = [
    ({}, False, "not quantized, the policy itself, by TRL; no correction"),
    (
        {},
        True,
        "not quantized, the policy itself, by TRL; no correction; LoRA beside the base",
    ),
    (
        VLLM,
        True,
        "not quantized, vLLM in the training process, by TRL; correction trl, mode sequence_mask, clip_max 3; LoRA "
        "merged",
    ),
    (
        SERVER | {"vllm_importance_sampling_correction": False},
        False,
        "not quantized, vLLM server, by TRL; no correction",
    ),
    ({"rollout_precision": "int8"}, True, f"INT8, embedded {NUMERICS}; correction tis, cap 2; LoRA merged"),
    ({"rollout_precision": "int8", "is_cap": 3.5}, False, f"INT8, embedded {NUMERICS}; correction tis, cap 3.5"),
    (
        {"rollout_precision": "fp8_block", "is_correction": "none"},
        False,
        f"FP8-block, embedded {NUMERICS}; no correction",
    ),
    (
        {"rollout_precision": "fp8", "is_correction": "icepop", "uaq_scale": 1.5},
        False,
        f"FP8, embedded {NUMERICS}; correction icepop, low 0.5, high 5; UAQ, scale 1.5",
    ),
    (
        {"rollout_precision": "int4", "is_correction": "coupled", "dynamic_sampling_rounds": 2},
        False,
        f"INT4, embedded {NUMERICS}; correction coupled; dynamic sampling, at most 2 further rounds",
    ),
    (
        {"rollout_precision": "int8", "noise_schedule": "cosine"} | VLLM,
        True,
        "INT8, vLLM in the training process; correction tis, cap 2; LoRA merged; noise cosine, sigma 0.01 to 0.0005",
    ),
    (
        {"rollout_precision": "fp8", "lora_sync": "adapter"} | VLLM,
        True,
        "FP8, vLLM in the training process; correction tis, cap 2; LoRA beside the base",
    ),
    ({"rollout_precision": "bf16"} | SERVER, False, "BF16, vLLM server; correction tis, cap 2"),
    (
        {"rollout_precision": "bf16", "is_correction": "trl"} | VLLM,
        False,
        "BF16, vLLM in the training process; correction trl, mode sequence_mask, clip_max 3",
    ),
    (
        {"train_precision": "nvfp4"},
        True,
        f"NVFP4, embedded, from the policy's own layers {NUMERICS}; correction tis, cap 2; LoRA beside the base; "
        "training on a frozen NVFP4 base",
    ),
    (
        {"train_precision": "nf4", "rollout_precision": "int8"},
        True,
        f"INT8, embedded {NUMERICS}; correction tis, cap 2; LoRA merged; training on a frozen NF4 base",
    ),
    (
        {"train_precision": "nvfp4"} | VLLM,
        True,
        "NVFP4, vLLM in the training process; correction tis, cap 2; LoRA beside the base; training on a frozen NVFP4 "
        "base",
    ),
    (
        {"train_precision": "int8"},
        True,
        f"INT8, embedded, from the policy's own layers {NUMERICS}; correction tis, cap 2; LoRA merged; "
        "training in INT8",
    ),
    (
        {"train_precision": "int8", "exact_rollouts": True} | VLLM,
        False,
        "INT8, vLLM in the training process; correction tis, cap 2; training in INT8, with the engine's own kernels",
    ),
]


@pytest.mark.parametrize(("settings", "adapted", "line"), LINES)
def test_one_line_says_what_a_run_does(tmp_path, settings, adapted, line):
    args = training.config(QuantGRPOConfig, tmp_path, **settings)
    assert summary(args, adapted) == f"Sampling: {line}"


def test_ais_has_its_own(tmp_path):
    args = training.config(AISGRPOConfig, tmp_path, rollout_precision="int4")
    assert summary(args, False).endswith("correction ais, cap 5, delta 0.02, gamma 1.2, beta_var 1")


def printed(capsys) -> list[dict]:
    """The metrics that were printed."""
    return [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("adapted", [False, True])
def test_the_line_is_printed_once_and_stands_in_the_card(tmp_path, capsys, adapted):
    args = training.config(
        QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=2, save_strategy="steps", save_steps=1
    )
    trainer = training.make(QuantGRPOTrainer, args, peft_config=training.lora() if adapted else None)
    line = summary(args, adapted)
    assert capsys.readouterr().out.count(line) == 1
    trainer.train()
    assert line not in capsys.readouterr().out
    card = (tmp_path / "README.md").read_text()
    assert card.count(line) == 1 and f"trl_quant {__version__}" in card and "\n- trl-quant\n" in card
    assert "\n- grpo\n" in card and "Cite GRPO as" in card  # TRL's is whole
    assert "trl-quant" in trainer.model.model_tags


def test_trls_own_trainer_says_nothing_of_us(tmp_path, capsys):
    args = training.config(GRPOConfig, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    training.make(GRPOTrainer, args).train()
    assert "Sampling:" not in capsys.readouterr().out
    assert "trl-quant" not in (tmp_path / "README.md").read_text()


def test_another_process_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(QuantGRPOTrainer, "is_world_process_zero", lambda self: False)
    training.make(QuantGRPOTrainer, training.config(QuantGRPOConfig, tmp_path, rollout_precision="int8"))
    assert "Sampling:" not in capsys.readouterr().out


# What is printed of a step


def test_the_console_prints_trls_metrics_and_four_of_ours(tmp_path, capsys):
    """Against TRL's own trainer, whose metrics are all printed; the log has the others too."""
    small = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    evaluated = {"eval_dataset": training.dataset(1)}
    plain = training.make(GRPOTrainer, training.config(GRPOConfig, tmp_path, **small), **evaluated)
    plain.train()
    of_trl = {name for entry in printed(capsys) for name in entry}
    assert of_trl == {name for entry in plain.state.log_history for name in entry} - {"step", "total_flos"}

    noisy = {"rollout_precision": "int4", "noise_schedule": "linear", "dynamic_sampling_rounds": 1, "icepop_low": 0.6}
    args = training.config(QuantGRPOConfig, tmp_path, is_correction="icepop", **small | noisy)
    trainer = training.make(QuantGRPOTrainer, args, **evaluated)
    trainer.train()
    names = {name for entry in printed(capsys) for name in entry}
    logged = {name for entry in trainer.state.log_history for name in entry}
    four = {"mismatch/kl_k3", "mismatch/ess_ratio", "mismatch/dropped_fraction"}
    of_ours = {name for name in names - of_trl if not name.removeprefix("eval_").startswith("sampling/")}
    assert of_ours == four | {f"eval_{name}" for name in four}
    hidden = {name.partition("/")[0] for name in logged - names} - {"step", "total_flos"}
    assert hidden == {"mismatch", "eval_mismatch", "weights", "noise", "dynamic_sampling", "profiling"}


def test_which_metrics_are_shown():
    kept = ("loss", "sampling/x", "rewards/mismatch/mean", "sync_check/bound", "eval_sync_check/bound", "eval_loss")
    left = ("mismatch/kl_k1", "eval_mismatch/entropy", "ais/alpha", "weights/x", "profiling/x", "noise/sigma")
    logs = dict.fromkeys([*kept, *left], 1.0)
    assert list(shown(logs)) == [*kept] and len(logs) == len(kept) + len(left)


def test_the_page_says_which_metrics_are_shown():
    """Those of its first table, and of its second one those of PPO's critic."""
    _, first, second, *_ = (ROOT / "docs" / "metrics.md").read_text().split("\n## ")
    told, others = (
        {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall("`([^`]+)`", row)}
        for table in (first, second)
    )
    assert len(told) == 4 and len(others) > 50
    assert {*shown(dict.fromkeys(told | others, 1.0))} == told | {name for name in others if name.startswith("value/")}


@pytest.mark.parametrize(
    ("quiet", "default", "ours"),
    [(True, PrinterCallback, SelectivePrinter), (False, ProgressCallback, SelectiveProgress)],
)
def test_only_the_default_is_replaced(tmp_path, quiet, default, ours):
    class Own(default):
        """A user's."""

    mine = [Own(), default()]
    args = training.config(QuantGRPOConfig, tmp_path, disable_tqdm=quiet)
    with warnings.catch_warnings(action="ignore"):
        trainer = training.make(QuantGRPOTrainer, args, callbacks=mine)
    found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, default)]
    assert found[:2] == mine and [type(callback) for callback in found[2:]] == [ours]
    trainer.remove_callback(ours)
    assert mine == [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, default)]


def test_the_default_is_removed_as_always(tmp_path):
    """Code that silences a run removes transformers' class, of which ours is one."""
    trainer = training.make(QuantGRPOTrainer, training.config(QuantGRPOConfig, tmp_path))
    trainer.remove_callback(PrinterCallback)
    assert not [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, PrinterCallback)]


def test_no_phase_is_called_vllms_without_vllm(tmp_path):
    trainer = training.make(
        QuantGRPOTrainer, training.config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=1)
    )
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert "profiling/transformers.generate" in names and not [name for name in names if "vllm" in name.lower()]


def test_ais_trainer_has_the_tag(tmp_path):
    trainer = training.make(AISGRPOTrainer, training.config(AISGRPOConfig, tmp_path, rollout_precision="int4"))
    assert "trl-quant" in trainer.model.model_tags
