"""GRPO with vLLM on this CPU: through the example that users copy, with faults on the way, and with refused options."""

import json
import runpy
import sys

import pytest
import torch
from places import ROOT
from tiny import save_tiny
from training import config, dataset, lora, make


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import COLOCATED, SMALL, fp8_block_anywhere, fresh, greedy, keep

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


pytestmark = pytest.mark.vllm
EXAMPLE = ROOT / "examples/train_grpo.py"


@pytest.fixture(autouse=True)
def trainers_live_on(monkeypatch):
    """The trainers of this test, newest last. To delete one would end the engines of the others."""
    made, train = [], QuantGRPOTrainer.train

    def remember(self, *args, **kwargs):
        keep(self)
        made.append(self)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(QuantGRPOTrainer, "train", remember)
    return made


SPECULATION = {"method": "ngram", "num_speculative_tokens": 2}


def settings(tmp_path, **overrides):
    options = {
        **COLOCATED,
        "rollout_precision": "int8",
        "max_steps": 3,
        "max_completion_length": 16,
    }
    return config(QuantGRPOConfig, tmp_path / "out", **options | overrides)


def trainer_of(tmp_path, model=None, **overrides):
    model = model or save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    kwargs = {name: overrides.pop(name) for name in ("peft_config", "train_dataset") if name in overrides}
    return make(QuantGRPOTrainer, settings(tmp_path, **overrides), model=model, **kwargs)


# The example


def run_example(tmp_path, monkeypatch, *options: str) -> list[dict]:
    """Runs `python examples/train_grpo.py` for three steps; returns what it logged."""
    # Wide rows, because the error of an exact INT8 product grows with the largest of a row's values
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16, **shape)
    rows = [json.dumps({"prompt": row["prompt"], "answer": "1"}) for row in dataset(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    command = f"""
        --model_name_or_path {model} --dataset_name {tmp_path}/train.jsonl --reward_funcs messages.spread_of_texts
        --output_dir {tmp_path}/out --max_steps 3 --logging_steps 1 --learning_rate 1e-3 --report_to none
        --per_device_train_batch_size 8 --num_generations 4 --max_completion_length 32 --use_cpu --bf16 false
        --gradient_checkpointing false --save_strategy no --disable_tqdm true --dtype float32
        --use_vllm --vllm_mode colocate --vllm_max_model_length 512 --sync_check_steps 2
    """
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *command.split(), *options])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--vllm_engine_kwargs", json.dumps(SMALL)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    state = json.loads((tmp_path / "out/trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


MODES = {
    "full": [],
    "merge": ["--use_peft", "--lora_target_modules", "all-linear"],
    "adapter": ["--use_peft", "--lora_target_modules", "all-linear", "--lora_sync", "adapter"],
}


# Precision, mode, and how many times as far from the policy as BF16 the samples are at least. These runs have each
# precision and each mode; test_vllm_engine.py has each precision merged, test_vllm_adapter.py each with an adapter.
RUNS = [
    ("bf16", "full", 1),
    ("int8", "full", 10),
    ("int8", "merge", 5),
    ("fp8_block", "full", 2),
    ("fp8_block", "adapter", 2),
]


@pytest.mark.slow
@pytest.mark.long
def test_example_trains(tmp_path, monkeypatch, trainers_live_on):
    """Three steps a run: the engine ends as a fresh one, and BF16 samples by far the nearest to the policy."""
    mismatch = []
    for precision, mode, _ in RUNS:
        if precision == "fp8_block":
            fp8_block_anywhere(monkeypatch)
        path = tmp_path / f"{precision}-{mode}"
        logs = run_example(path, monkeypatch, "--rollout_precision", precision, *MODES[mode])
        assert len(logs) == 3 and all(log["grad_norm"] > 0 for log in logs)
        mismatch.append(sum(log["mismatch/kl_k3"] for log in logs) / 3)
        checked = [log for log in logs if "sync_check/bound" in log]
        assert [log["step"] for log in checked] == [1, 3]
        assert all(log["sync_check/logp_difference"] < log["sync_check/bound"] for log in checked)
        trainer = trainers_live_on[-1]
        trainer.check_sync()
        if mode != "adapter":
            assert greedy(trainer.vllm_generation.llm) == greedy(fresh(trainer.model, precision, path / "fresh"))
            assert all("weights/normalized_quantization_error" in log for log in logs)
            assert all("weights/normalized_update" in log for log in logs[1:])
    print(mismatch)
    assert all(times * mismatch[0] <= kl for (*_, times), kl in zip(RUNS, mismatch, strict=True))


# Faults on the way


def test_crash_while_sampling_keeps_the_checkpoint(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    whole = trainer_of(tmp_path / "whole", model)
    whole.train()

    trainer = trainer_of(tmp_path, model, save_strategy="steps", save_steps=1)
    core, calls = trainer.vllm_generation.llm.llm_engine, []

    def crash():
        calls.append(trainer.state.global_step)
        if trainer.state.global_step == 2:
            raise RuntimeError("Engine core died")
        return step()

    step = core.step
    monkeypatch.setattr(core, "step", crash)
    with pytest.raises(RuntimeError, match=r"int8 rollout engine failed at step 2.*checkpoint-2.*Engine core died"):
        trainer.train()
    assert 1 in calls

    again = trainer_of(tmp_path, model, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_a_stale_engine_stops_the_run(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, sync_check_steps=1)
    engine, sync = trainer.vllm_generation.engine, trainer.vllm_generation.engine.sync
    monkeypatch.setattr(engine, "sync", lambda: sync() if trainer.state.global_step < 2 else forget(engine))
    with pytest.raises(RuntimeError, match=r"failed at step 2.*stale: the policy has moved"):
        trainer.train()


def forget(engine) -> None:
    engine.syncs_to_check = 0


def test_check_sync_at_once(tmp_path):
    trainer = trainer_of(tmp_path, sync_check_steps=0)
    trainer.train()
    assert not any("sync_check/bound" in log for log in trainer.state.log_history)
    found = trainer.check_sync()  # of the weights after the last step, which have not sampled yet
    assert found["sync_check/logp_difference"] < found["sync_check/bound"]
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="stale"):
        trainer.vllm_generation.check_sync()
    found = trainer.check_sync()  # syncs first, as the next generation would
    assert found["sync_check/logp_difference"] < found["sync_check/bound"]
    embedded = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "e", rollout_precision="int8"))
    with pytest.raises(ValueError, match="use_vllm=True"):
        embedded.check_sync()


def test_noise_is_on_the_samples_alone(tmp_path):
    trainer = trainer_of(
        tmp_path,
        rollout_precision="bf16",
        noise_schedule="exponential",
        noise_sigma_start=0.2,
        noise_sigma_end=0.1,
        noise_stages=3,
        learning_rate=0.0,
    )
    trainer.train()
    logs = trainer.state.log_history[:3]
    assert [log["noise/sigma"] for log in logs] == [0, 0.2, 0.1]
    kl = [log["mismatch/kl_k3"] for log in logs]
    assert kl[0] < 1e-3 < 0.01 < kl[2] and kl[1] > 10 * kl[0]
    assert trainer.check_sync()["sync_check/logp_difference"] < 0.05  # the check takes the noise off


def test_lora_base_is_never_written(tmp_path):
    trainer = trainer_of(tmp_path, peft_config=lora())
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert base and all(torch.equal(p, after[name]) for name, p in base.items())


# Names and refusals


def test_names_stay_trls(tmp_path):
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm import LLM

    trainer = trainer_of(tmp_path)
    keep(trainer)
    assert isinstance(trainer.vllm_generation, VLLMGeneration) and isinstance(trainer.vllm_generation.llm, LLM)
    trainer.vllm_generation.sync_weights()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vllm_engine_kwargs": {"enforce_egaer": True}}, ["enforce_egaer", "EngineArgs", "enforce_eager"]),
        ({"vllm_engine_kwargs": {"quantization": "fp8"}}, ["quantization", "rollout_precision"]),
        ({"vllm_engine_kwargs": {"max_model_len": 5}}, ["max_model_len", "vllm_max_model_length"]),
        ({"vllm_engine_kwargs": {"kv_cache_dtype": "nvfp4"}}, ["kv_cache_dtype", "'nvfp4'", "'auto'", "'fp8_e5m2'"]),
        ({"vllm_engine_kwargs": {"calculate_kv_scales": True}}, ["calculate_kv_scales", "stale", "Leave it out"]),
        *(
            ({"vllm_engine_kwargs": {"speculative_config": SPECULATION}} | option, words)
            for option, words in (
                ({"min_p": 0.1}, ["`min_p`=0.1", "'speculative_config'", "ignores or refuses"]),
                ({"repetition_penalty": 1.2}, ["`repetition_penalty`=1.2", "'speculative_config'", "self-check"]),
                ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, ["`logit_bias`={3: 1.0}", "'speculative_config'"]),
                ({"generation_kwargs": {"min_tokens": 4}}, ["`min_tokens`=4", "'speculative_config'"]),
                ({"vllm_structured_outputs_regex": "a"}, ["`structured_outputs`='a'", "'speculative_config'"]),
            )
        ),
        ({"lora_sync": "files"}, ["lora_sync", "'files'", "'adapter'"]),
        ({"vllm_sleep_level": 3}, ["vllm_sleep_level", "3"]),
        ({"sync_check_steps": -1}, ["sync_check_steps", "-1"]),
        (
            {"lora_sync": "adapter", "vllm_enable_sleep_mode": True, "vllm_sleep_level": 2},
            ["lora_sync", "vllm_sleep_level", "base"],
        ),
        ({"lora_sync": "adapter", "use_vllm": False}, ["lora_sync", "use_vllm"]),
    ],
)
def test_refused_before_anything_is_loaded(tmp_path, options, words):
    with pytest.raises(ValueError) as refusal:
        settings(tmp_path, **options)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_speculation_is_taken(tmp_path):
    """Beside the options that its check computes, and those that do not change the tokens' distribution."""
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "generation_kwargs": {"stop": ["a"], "max_tokens": 9}}
    given = {"speculative_config": SPECULATION}
    assert settings(tmp_path, vllm_engine_kwargs=given, **options).vllm_engine_kwargs == given
    assert settings(tmp_path, vllm_engine_kwargs=SMALL, min_p=0.1, repetition_penalty=1.2).min_p == 0.1


def test_sleep_levels_that_are_not_set(tmp_path):
    """What an adapter's base needs, else the one that frees the most."""
    assert settings(tmp_path, lora_sync="adapter", vllm_enable_sleep_mode=True).vllm_sleep_level == 1
    assert settings(tmp_path, lora_sync="merge", vllm_enable_sleep_mode=True).vllm_sleep_level == 2


def test_engine_kwargs_from_the_command_line(tmp_path):
    assert settings(tmp_path, vllm_engine_kwargs=json.dumps(SMALL)).vllm_engine_kwargs == SMALL


def test_precision_of_another_device(tmp_path):
    with pytest.raises(ValueError, match=r"'nvfp4'.*vLLM.*CPU.*'int8'.*use_vllm=False"):
        trainer_of(tmp_path, model="no/such-model", rollout_precision="nvfp4")  # before the model is looked for
