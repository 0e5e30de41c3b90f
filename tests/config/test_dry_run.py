"""Wrong names, long prompts, missing attention and unsavable models are found before a model is loaded."""

import inspect
import json
import logging
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset, IterableDataset
from huggingface_hub import HfApi
from huggingface_hub.utils import httpx
from packaging.version import Version
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training import config, lora, make, spread
from transformers import AutoModelForCausalLM, GenerationConfig

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main
from trl_quant.config import lengths
from trl_quant.config.before_loading import check_before_loading
from trl_quant.config.checks import RULES
from trl_quant.config.lengths import Context, context_of, measured
from trl_quant.config.saving import check_savable, read_generation_config
from trl_quant.trainers.checks import DrawnPrompts
from trl_quant.trainers.launch import TRAINERS


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def prompts(*values) -> Dataset:
    return Dataset.from_dict({"prompt": list(values)})


def check(model, args, train_dataset=None, eval_dataset=None, reward_funcs=spread, **others) -> None:
    given = dict.fromkeys(("peft_config", "environment_factory", "rollout_func", "quantization_config")) | others
    data = prompts("1+1=", "2+2=") if train_dataset is None else train_dataset
    check_before_loading(model, args, data, eval_dataset, reward_funcs=reward_funcs, **given)


def small(trainer: str = "grpo", **settings):
    """A config of a trainer, in which two prompts are enough."""
    config_class = TRAINERS[trainer].config_class
    given = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": [], "num_generations": 4}
    given |= {"per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.0} | settings
    if trainer == "distillation":
        given |= {"per_device_train_batch_size": 1, "beta": 0.5}
    if trainer == "diffusion":
        given |= {"max_completion_length": 32}
    names = {f.name for f in fields(config_class)}
    return config_class(**{name: value for name, value in given.items() if name in names})


# Names of models


@pytest.fixture
def hub(monkeypatch):
    """A hub that cannot be reached. What is asked of it is recorded; nothing else may try to load a name."""
    asked = []

    def unreachable(self, name, **options):
        asked.append(name)
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    return asked


def places_of_names(trainer: str) -> list[str]:
    """The fields, and the arguments of TRL's trainer, in which a string names a model."""
    trainer_class = TRAINERS[trainer]
    if trainer == "async_grpo":  # without reward models, and without vLLM in its process
        return ["model"]
    named = [f.name for f in fields(trainer_class.config_class) if f.name.endswith("model_name_or_path")]
    base = next(kind for kind in trainer_class.__mro__ if kind.__module__.startswith("trl."))
    given = inspect.signature(base.__init__).parameters
    arguments = [name for name in given if name.endswith("model") or name == "reward_funcs"]
    started = [f"vllm_engine_kwargs['{name}']" for name in ("model", "tokenizer")]
    return [*named, *arguments, *(started if trainer != "diffusion" else [])]  # vLLM does not denoise


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_mistyped_name_is_found_on_the_disk(trainer, model_dir, hub, tmp_path, monkeypatch):
    """In every place where a run names a model: after one question to the hub, with the directory that was meant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(RULES, "machine", ())
    Path("runs/model").mkdir(parents=True)
    places = places_of_names(trainer)
    assert len(places) >= 2 or trainer == "async_grpo"
    for place in places:
        settings, given = {}, {"model": model_dir, "processing_class": tiny_tokenizer()}
        if trainer == "distillation":
            given["teacher_model"] = model_dir
        if place.startswith("vllm"):
            settings = {"rollout_precision": "int8", "use_vllm": True, "vllm_mode": "colocate"}
            settings["vllm_engine_kwargs"] = {place.split("'")[1]: "runs/modle"}
        elif place == "teacher_model_name_or_path":
            settings[place] = given["teacher_model"] = "runs/modle"
        elif place in TRAINERS[trainer].config_class.__dataclass_fields__:
            settings[place] = "runs/modle"
        else:
            given[place] = "runs/modle"
        if trainer == "diffusion":  # would be refused before: the policy is no diffusion model
            for name in ("check_bidirectional", "mask_token_of"):
                monkeypatch.setattr(f"trl_quant.config.checks.diffusion.{name}", lambda *given: None)
        hub.clear()
        args = small(trainer, **settings)
        with pytest.raises(ValueError) as error:
            check(given.pop("model"), args, **given)
        told = str(error.value)
        field = "teacher_model" if place.startswith("teacher") else place
        assert f"`{field}`='runs/modle' is neither a directory here" in told, place
        assert "Did you mean 'runs/model'?" in told and "Name or service not known" in told
        assert hub == ["runs/modle"], place


COMMANDS = (  # a command with a mistyped model
    ["prepare", "--model", "runs/modle", "--format", "int8", "--output", "out"],
    ["export", "--model", "runs/modle", "--format", "int8", "--output", "out"],
    ["plan", "runs/modle", "--dataset_name", "data.jsonl"],
    ["train", "--model_name_or_path", "runs/modle", "--dataset_name", "data.jsonl", "--use_cpu", "true"],
    ["eval", "runs/modle", "--task", "gsm8k"],
    ["report", "--mismatch", "runs/modle"],
)


@pytest.mark.parametrize("argv", COMMANDS, ids=[argv[0] for argv in COMMANDS])
def test_a_command_tells_at_once(argv, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/model").mkdir(parents=True)
    if argv[0] in ("plan", "train"):
        argv = [*argv, "--report_to", "none", "--bf16", "false"]
    with pytest.raises(SystemExit, match=r"runs/modle.* is neither a directory here.*Did you mean 'runs/model'\?"):
        main(argv)
    assert hub == ["runs/modle"]


def test_no_one_is_asked_of_what_is_here(model_dir, hub, tmp_path, monkeypatch):
    from trl_quant.storage import named

    named.check_named("model", model_dir)
    monkeypatch.setattr(named, "try_to_load_from_cache", lambda name, file, revision=None: "config.json")
    named.check_named("model", "Qwen/Qwen2.5-0.5B")
    assert hub == []
    with pytest.raises(ValueError, match="Repo id must"):  # no name of the hub has two slashes
        named.check_named("model", "runs/some/modle")
    assert hub == []
    monkeypatch.setattr(HfApi, "model_info", lambda self, name, **options: hub.append(name))
    monkeypatch.setattr(named, "try_to_load_from_cache", lambda *given, **options: None)
    named.check_named("model", "Qwen/Qwen2.5-0.5B")
    assert hub == ["Qwen/Qwen2.5-0.5B"]


# What could not be saved


SAVES_ALL = Version(transformers.__version__) >= Version("5.24")
SAVED = {  # generation config -> whether transformers saves it: asked below, so that a version that changes is found
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.1},
    "penalty": {"length_penalty": 2.0},
    "padding": {"pad_token_id": -1},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "greedy": {"do_sample": False},
    "nothing": {},
}


def with_generation(path: Path, file: str, **settings) -> str:
    directory = save_tiny(path)
    found = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(found | settings))
    if file == "config.json":
        (path / "generation_config.json").unlink()
    return directory


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_cannot_be_saved_is_refused(file, tmp_path):
    """Exactly what transformers refuses once the model is loaded."""
    found = []
    for name, settings in SAVED.items():
        directory = with_generation(tmp_path / name, file, **settings)
        model = AutoModelForCausalLM.from_pretrained(directory)
        try:
            model.save_pretrained(tmp_path / "saved")
        except ValueError:
            for policy in (directory, model):
                with pytest.raises(ValueError, match=f"could not save the policy .*{next(iter(settings))}"):
                    check(policy, small(), processing_class=tiny_tokenizer())
            check(directory, small(), peft_config=lora(), processing_class=tiny_tokenizer())  # saves the adapter
        else:
            check(directory, small(), processing_class=tiny_tokenizer())
            found.append(name)
    assert {"sampling", "greedy", "nothing"} <= {*found}
    assert len(found) == len(SAVED) if SAVES_ALL else len(found) < len(SAVED) - 2


@pytest.mark.skipif(SAVES_ALL, reason="transformers saves it")
def test_the_run_and_its_dry_run_refuse_it(tmp_path, monkeypatch):
    """Before weights are read."""
    directory = with_generation(tmp_path / "model", "generation_config.json", temperature=0.7)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(8)))

    def loaded(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", loaded)
    with pytest.raises(ValueError, match="could not save the policy"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out"), model=directory)
    argv = ["train", "--model_name_or_path", directory, "--dataset_name", str(data), "--use_cpu", "true", "--bf16"]
    argv += ["false", "--report_to", "none", "--reward_funcs", "arithmetic", "--output_dir", str(tmp_path / "out")]
    for dry in ([], ["--dry_run", "true"]):
        with pytest.raises(SystemExit, match="could not save the policy after the training"):
            main([*argv, *dry])


def test_a_critic_is_saved_too(model_dir, tmp_path, monkeypatch):
    """Its config alone: a critic generates no text."""
    args = small("ppo", value_model_name_or_path=model_dir)
    check(model_dir, args, processing_class=tiny_tokenizer())
    own = check_savable

    def broken(whose, *configs):
        if whose == "the critic":
            raise ValueError(f"{whose}: {type(configs[0]).__name__}")
        own(whose, *configs)

    monkeypatch.setattr("trl_quant.config.checks.critic.check_savable", broken)
    with pytest.raises(ValueError, match="the critic: Qwen3Config"):
        check(model_dir, args, processing_class=tiny_tokenizer())


def test_the_generation_config_is_read_as_transformers_reads_it(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert read_generation_config(model_dir, small()).to_dict() == model.generation_config.to_dict()
    assert isinstance(read_generation_config(model, small()), GenerationConfig)


# Attention


@pytest.mark.parametrize("trainer", ["grpo", "distillation"])
def test_attention_that_is_not_installed(trainer, model_dir, monkeypatch):
    """In each field with a model's arguments."""
    config_class = TRAINERS[trainer].config_class
    options = [f.name for f in fields(config_class) if f.name.endswith("model_init_kwargs")]
    teacher = {"teacher_model": model_dir} if trainer == "distillation" else {}
    for option in options:
        hub = [("kernels-community/flash-attn", (ImportError, OSError))] if trainer == "grpo" else []
        for attention, error in (  # transformers refuses a kernel of the hub only once in a process
            *hub,
            ("flash_attention_2", ImportError),
            ("flash_attention_3", ImportError),
            ("sage", ValueError),
            ("eager", None),
            ("sdpa", None),
        ):
            args = small(trainer, **{option: {"attn_implementation": attention}})
            if error is None:
                check(model_dir, args, processing_class=tiny_tokenizer(), **teacher)
                continue
            with pytest.raises(error, match=f"`attn_implementation`='{attention}', in `{option}`, does not work here"):
                check(model_dir, args, processing_class=tiny_tokenizer(), **teacher)
            check(
                model_dir, args, processing_class=tiny_tokenizer(), here=False, **teacher
            )  # a plan for another machine


# Lengths


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def plus(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_lengths_are_those_that_the_trainer_draws(tmp_path):
    """Plain prompts and conversations, with and without arguments of the template."""
    template = {"chat_template_kwargs": {"shout": True}}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if shout %}SHOUT!{% endif %}"
    for data, settings in ((prompts("1+1=", "hello"), {}), (prompts(said("1+1="), said("hi")), template)):
        args = config(QuantGRPOConfig, tmp_path, **settings)
        trainer = make(QuantGRPOTrainer, args, train_dataset=data, processing_class=tokenizer)
        drawn = [len(ids) for ids in trainer._tokenize_prompts(data["prompt"][:])[0]]
        found = measured("train_dataset", data, tokenizer, None, args.chat_template_kwargs)
        assert sorted(found.tokens) == sorted(drawn) and found.source == "all 2 prompts"
    assert found.longest > measured("train_dataset", data, tokenizer).longest  # without the template's arguments


def test_tools_take_room():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + tokenizer.chat_template
    data = prompts(said("1+1="))
    found = [measured("train_dataset", data, tokenizer, tools).longest for tools in (None, [plus])]
    assert found[1] > found[0] + 50


def test_a_large_dataset_is_sampled_and_a_stream_is_not_read(monkeypatch):
    data = prompts(*["1"] * 999, "1" * 50)
    assert measured("x", data, tiny_tokenizer()).longest == 50
    monkeypatch.setattr(lengths, "SECONDS", 0.0)
    found = measured("x", data, tiny_tokenizer())
    assert found.source == f"{lengths.TOGETHER} of 1000 prompts, drawn at random," and found.rows == 1000
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "1"}]))
    assert measured("x", stream, tiny_tokenizer()) is None
    assert measured("x", data.with_transform(lambda rows: rows), tiny_tokenizer()) is None


def test_a_template_that_refuses_a_prompt_is_told():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(ValueError, match="`eval_dataset`: the chat template refuses a prompt: no system prompts"):
        measured("eval_dataset", prompts(said("1")), tokenizer)


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "ppo", "distillation"])
def test_a_prompt_beyond_the_context_is_refused(trainer, model_dir, caplog, monkeypatch):
    """In the training data and in each evaluation set; one that fits but leaves too little room is told."""
    monkeypatch.setitem(RULES, "machine", ())
    sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    args = small(trainer, **sampler)
    given = {"processing_class": tiny_tokenizer()}
    given |= {"teacher_model": model_dir} if trainer == "distillation" else {}
    fine = prompts("1+1=", "2+2=")
    for length in (56, 57, 63, 64, 619):
        long = prompts("1+1=", "1" * length)
        for datasets, name in (
            ({"train_dataset": long}, "train_dataset"),
            ({"train_dataset": fine, "eval_dataset": long}, "eval_dataset"),
            ({"train_dataset": fine, "eval_dataset": {"a": fine, "b": long}}, r"eval_dataset\['b'\]"),
        ):
            caplog.clear()
            if length >= 64:
                with pytest.raises(ValueError, match=f"`{name}` .*has a prompt of {length} tokens.*length`=64. Remove"):
                    check(model_dir, args, **datasets, **given)
                check(model_dir, args, **datasets, **given, rollout_func=lambda prompts, trainer: {})
            else:
                check(model_dir, args, **datasets, **given)
                assert ("has 1 prompts that leave less than `max_completion_length`=8" in caplog.text) == (length > 56)


def test_whose_context_it_is():
    """vLLM ends at its context; a model with rotary positions goes on beyond those that it was trained on."""
    model = tiny_model()
    embedded, served = small(rollout_precision="int8"), small(use_vllm=True, vllm_mode="server")
    colocated = small(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64)
    assert context_of(embedded, model.config) == Context(2048, "the model's `max_position_embeddings`", False)
    assert context_of(served, model.config, 512) == Context(512, "the server's `--max-model-len`", True)
    assert context_of(served, model.config).tokens == 2048 and context_of(served, model.config).ends
    assert context_of(colocated, model.config) == Context(64, "`vllm_max_model_length`", True)
    learned = transformers.GPT2Config(n_positions=32)
    assert context_of(embedded, learned) == Context(32, "the model's `max_position_embeddings`", True)
    stretched = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert context_of(small(use_vllm=True), tiny_model(**stretched).config).tokens == 4096


def test_prompts_of_a_stream_are_checked_when_they_are_drawn(tmp_path, caplog):
    rows = [{"prompt": "1" * n} for n in (4, 20, 4, 4)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    for limit, refused in ((20, True), (21, False), (512, False)):
        args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=2)
        trainer = make(QuantGRPOTrainer, args, train_dataset=stream)
        engine = SimpleNamespace(limits=lambda limit=limit: (16, limit))
        trainer.drawn_prompts = DrawnPrompts(trainer, engine)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            if refused:
                with pytest.raises(ValueError, match=r"step \d has a prompt of 20 tokens.*`max_model_len`=20"):
                    trainer.train()
            else:
                trainer.train()
        assert caplog.text.count("prompts that leave less than") == (limit == 21)
        assert (trainer.state.global_step == 2) == (not refused)


def test_the_plan_says_which_prompts_were_measured(model_dir, tmp_path, capsys, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "1"}) + "\n" for n in range(1, 200)))
    argv = ["plan", model_dir, "--dataset_name", str(data), "--reward_funcs", "arithmetic", "--report_to", "none"]
    main(argv)
    assert "(all 199 prompts were measured)" in capsys.readouterr().out
    monkeypatch.setattr(lengths, "SECONDS", 0.0)
    main(argv)
    assert "(128 of 199 prompts, drawn at random, were measured)" in capsys.readouterr().out
    assert torch.get_default_dtype() == torch.float32  # nothing of the plan is left
