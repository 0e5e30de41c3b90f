"""Files that are not what they should be: a policy's, a checkpoint's, a log's. One clear error before they are used."""

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
from refusals import INT8, VLLM, build, check, prompts, refused
from safetensors import SafetensorError
from tiny import VOCAB_SIZE, save_tiny
from training import config, make, trainer_for
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.models.architecture import differences
from trl_quant.report.runs import read_run
from trl_quant.runs import checkpoints
from trl_quant.storage import run_checkpoints
from trl_quant.storage.layout import quantization_config


# What needs the model's config.json


@pytest.fixture
def written(tmp_path):
    """Writes a config.json, the only file there is, and returns its directory."""

    def write(config_class=Qwen3Config, **changes) -> str:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        quantization = changes.pop("quantization_config", None)
        made = config_class(**sizes | changes)
        made.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
        directory = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        made.save_pretrained(directory)
        if quantization is not None:
            file = directory / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
        return str(directory)

    return write


REFUSED_POLICIES = [  # arguments, config.json -> what the message says
    (INT8, {"quantization_config": quantization_config("int8")}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized already"),
    (INT8, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "is quantized already"),
    (
        VLLM | {"rollout_precision": "fp8_tensor"},
        {"config_class": Qwen3MoeConfig, "num_experts": 8},
        "vLLM has no kernel that multiplies experts as this precision says",
    ),
    (
        VLLM,
        {"config_class": Qwen3MoeConfig, "num_experts": 8},
        "a mixture of experts, which vLLM was shown to run on a CPU in 'bf16' alone",
    ),
    (
        {"train_precision": "int8"},
        {"config_class": MixtralConfig},
        "='int8', but the policy is a mixture of 8 experts",
    ),
    (INT8, {"config_class": DeepseekV3Config}, "is a mixture of 256 experts, and engines here know"),
    (INT8, {"is_encoder_decoder": True}, "is an encoder with a decoder"),
    (INT8, {"text_config": {"n_routed_experts": 64}}, "is a mixture of 64 experts"),
]
ACCEPTED_POLICIES = [
    (INT8, {}),
    (INT8, {"quantization_config": BitsAndBytesConfig(load_in_4bit=True).to_dict()}),
    (INT8, {"num_experts": 1}),
    (INT8, {"num_experts": None, "num_experts_per_tok": 8}),
    ({}, {"config_class": Qwen3MoeConfig, "num_experts": 8}),
    (INT8, {"config_class": Qwen3MoeConfig, "num_experts": 8}),
    (INT8, {"config_class": MixtralConfig}),
    ({}, {"quantization_config": quantization_config("int8")}),
]


@pytest.mark.parametrize(("settings", "model", "says"), REFUSED_POLICIES, ids=range(len(REFUSED_POLICIES)))
def test_a_policy_that_no_engine_samples_from_is_refused(settings, model, says, written, monkeypatch):
    if "vLLM was shown" in says:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr("trl_quant.config.checks.machine.check_version", lambda: None)
    monkeypatch.setattr("trl_quant.config.checks.machine.check_device", lambda *args: None)
    with pytest.raises(ValueError) as error:
        check(written(**model), build(**settings, num_generations=4, per_device_train_batch_size=4))
    assert says in str(error.value)


@pytest.mark.parametrize(("settings", "model"), ACCEPTED_POLICIES, ids=range(len(ACCEPTED_POLICIES)))
def test_its_neighbour_is_sampled_from(settings, model, written):
    check(written(**model), build(**settings, num_generations=4, per_device_train_batch_size=4))


@pytest.mark.parametrize("changes", [{"hidden_size": 256}, {"num_key_value_heads": 4}, {"config_class": LlamaConfig}])
def test_two_models_are_told_apart(changes, written):
    mine, theirs = (AutoConfig.from_pretrained(written(**options)) for options in ({}, changes))
    assert differences(mine, AutoConfig.from_pretrained(written())) == ""
    name = next(iter(changes)).replace("config_class", "model_type")
    assert f"{name} (" in differences(mine, theirs)


@pytest.mark.vllm
def test_what_the_engine_starts_on(written):
    pytest.importorskip("vllm")

    def arguments(model):
        return build(**VLLM, vllm_engine_kwargs={"model": model}, num_generations=4, per_device_train_batch_size=4)

    policy = written()
    refused(
        lambda: check(policy, arguments("/nowhere")),
        "`vllm_engine_kwargs['model']`='/nowhere'",
        "is neither",
    )
    other = written(hidden_size=256)
    refused(lambda: check(policy, arguments(other)), "another model than the policy: hidden_size (256, not 128)")
    mxfp4 = written(quantization_config=quantization_config("mxfp4"))
    refused(lambda: check(policy, arguments(mxfp4)), "`rollout_precision`='int8'", "quantized to 'mxfp4'")
    check(policy, arguments(written(quantization_config=quantization_config("int8"))))
    check(policy, arguments(written()))


@pytest.mark.vllm
def test_heads_that_vllm_lacks_on_a_cpu(written):
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's kernels for CPUs")
    args = build(**VLLM, num_generations=4, per_device_train_batch_size=4)
    refused(lambda: check(written(head_dim=48), args), "heads have 48 dimensions", "32, 64", "use_vllm=False")
    check(written(head_dim=64), args)
    check(written(head_dim=48), build(**INT8, num_generations=4, per_device_train_batch_size=4))


def test_what_is_no_model_is_refused(tmp_path):
    args = config(QuantGRPOConfig, tmp_path)
    refused(lambda: make(QuantGRPOTrainer, args, tmp_path), "`model`=", "must be a name, a directory or a model")


def test_an_output_dir_that_cannot_be_written_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    """As on the command line; transformers would make the directory after the models are loaded."""
    model = save_tiny(tmp_path / "model")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("trl_quant.trainers.sampling.engine_of", None)  # which would load the policy
    for place in ("file", "file/in/it"):
        args = config(QuantGRPOConfig, tmp_path / place, **INT8)
        refused(lambda: make(QuantGRPOTrainer, args, model), "`output_dir`=", "file is not a directory")  # noqa: B023
    with pytest.raises(TypeError, match="not callable"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "new", **INT8), model)


def test_nothing_is_loaded_before(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model")

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    args = config(QuantGRPOConfig, tmp_path, **INT8)
    refused(lambda: make(QuantGRPOTrainer, args, model, train_dataset=prompts()), "`train_dataset` is empty")
    with pytest.raises(AssertionError, match="a model was loaded"):
        make(QuantGRPOTrainer, args, model)


def test_a_truncated_file_of_the_policy_is_named(tmp_path):
    file = Path(save_tiny(tmp_path / "model")) / "model.safetensors"
    check(str(file.parent))
    os.truncate(file, file.stat().st_size // 2)
    refused(lambda: check(str(file.parent)), "model.safetensors")


# While running


trainer_of = partial(trainer_for, rollout_precision="int4", max_steps=2, save_strategy="steps", save_steps=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of two steps with two checkpoints."""
    path = tmp_path_factory.mktemp("run") / "run"
    trainer_of(path).train()
    return path


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_half_written_checkpoints_are_not_resumed(copied):
    for step in (1, 2):
        (copied / f"checkpoint-{step}" / "trainer_state.json").write_text('{"log_')
    text = run_checkpoints.how_to_go_on(copied)
    assert "checkpoint-1, checkpoint-2" in text and "resume_from_checkpoint" not in text
    trainer = trainer_of(copied)
    refused(lambda: trainer.train(resume_from_checkpoint=True), "`resume_from_checkpoint`=True", text)
    half = str(copied / "checkpoint-2")
    refused(lambda: trainer.train(resume_from_checkpoint=half), half, "trainer_state.json is not whole")
    (copied / "checkpoint-2" / "manifest.json").unlink()
    refused(lambda: trainer.train(resume_from_checkpoint=half), f"{half!r} was not written to its end", text)


def test_the_directory_of_a_run_is_no_checkpoint(copied, tmp_path):
    newest = str(copied / "checkpoint-2")
    for trainer in (trainer_of(copied), trainer_of(tmp_path / "another")):
        resume = lambda: trainer.train(resume_from_checkpoint=str(copied))  # noqa: B023, E731
        refused(resume, f"`resume_from_checkpoint`={str(copied)!r} is the directory of a run", newest)


def test_nothing_to_resume(tmp_path):
    trainer = trainer_of(tmp_path)
    refused(lambda: trainer.train(resume_from_checkpoint=True), "there is nothing to resume", "no checkpoint in")


def test_a_checkpoint_without_whole_weights_does_not_count(copied):
    assert run_checkpoints.last_complete_checkpoint(copied).endswith("checkpoint-2")
    file = copied / "checkpoint-2" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    assert run_checkpoints.last_complete_checkpoint(copied).endswith("checkpoint-1")
    (copied / "checkpoint-1" / "model.safetensors").unlink()  # killed while deleting
    assert run_checkpoints.last_complete_checkpoint(copied) is None


def test_a_truncated_state_of_the_rollouts_is_named(copied):
    assert run_checkpoints.read_rollout_state(copied / "checkpoint-2")
    assert run_checkpoints.read_rollout_state(copied) == {}
    (copied / "checkpoint-2" / "rollout_state.json").write_text('{"normal')
    refused(
        lambda: run_checkpoints.read_rollout_state(copied / "checkpoint-2"),
        "rollout_state.json is damaged or incomplete",
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["torch", "quota", "safetensors"],
)
def test_a_full_disk_is_told_with_the_directory_and_the_last_checkpoint(copied, error, monkeypatch):
    trainer = trainer_of(copied, max_steps=3, resume_with_changes=True)

    def full(output_dir):
        raise error

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError) as raised:
        trainer.train(resume_from_checkpoint=True)
    assert raised.value.errno == errno.ENOSPC
    message = str(raised.value)
    assert f"while saving {copied}/checkpoint-3: " in message and "MiB are free" in message
    assert f"The last whole checkpoint is {copied}/checkpoint-2" in message


def test_other_errors_of_saving_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError, match="denied"), checkpoints.saving(str(tmp_path / "checkpoint-1")):
        raise PermissionError(errno.EACCES, "denied")
    elsewhere = tmp_path / "of another host" / "checkpoint-1"  # a host that does not save has no such directory
    with pytest.raises(RuntimeError, match="closed by peer"), checkpoints.saving(str(elsewhere)):
        raise RuntimeError("gloo: Connection closed by peer")


# What a run leaves behind


def test_a_finished_run_without_its_own_state_is_done(copied):
    (copied / "trainer_state.json").unlink(missing_ok=True)
    assert read_run(copied).status == "done"
    shutil.rmtree(copied / "checkpoint-2")
    assert read_run(copied).status == "at step 1 of 2"


def test_a_log_may_end_in_half_a_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    assert [entry["step"] for entry in read_run(tmp_path).history] == [1]
    log.write_text('{"step": 1, "rew\n{"step": 2, "reward": 0.5}\n')
    refused(lambda: read_run(tmp_path), "metrics.jsonl, line 1")
