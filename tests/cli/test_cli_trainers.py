"""`trl-quant train --trainer`: RLOO, distillation and diffusion from the command line, and plans."""

import json
import re
import runpy

import pytest
import torch
from masked_policy import policy, tokenizer
from places import ROOT
from tiny import save_tiny
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig

import trl_quant.cli.train as train
from trl_quant import (
    DiffusionGRPOConfig,
    QuantAsyncGRPOConfig,
    QuantDistillationConfig,
    QuantGRPOConfig,
    QuantPPOConfig,
    QuantRLOOConfig,
)
from trl_quant.cli import main
from trl_quant.cli.options import chosen_trainer, trl_configs
from trl_quant.report.runs import read_run
from trl_quant.trainers.launch import TRAINERS


PROBLEMS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(path / name, seed=seed) for name, seed in (("student", 3), ("teacher", 4))}


@pytest.fixture
def argv(models, tmp_path) -> list[str]:
    """A small run on the CPU, for any trainer."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    options = {
        "model_name_or_path": models["student"],
        "dataset_name": problems,
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
        "bf16": "false",
        "gradient_checkpointing": "false",
        "rollout_precision": "int4",
    }
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


CONFIGS = [(name, trainer.config_class) for name, trainer in TRAINERS.items()]


def test_every_trainer_has_its_options():
    """TRL warns of the package of its asynchronous trainer, which is imported for those alone who ask for it."""
    configs = dict(CONFIGS)
    assert [name for name, trainer in TRAINERS.data.items() if isinstance(trainer, str)] == ["async_grpo"]
    assert configs == {
        "grpo": QuantGRPOConfig,
        "ppo": QuantPPOConfig,
        "rloo": QuantRLOOConfig,
        "distillation": QuantDistillationConfig,
        "diffusion": DiffusionGRPOConfig,
        "async_grpo": QuantAsyncGRPOConfig,
    }
    assert {name: classes[-1][1] for name, classes in trl_configs().items()} == {
        name: config.trl_config.__name__ for name, config in configs.items()
    }


def test_rloo_trains(argv, tmp_path, models):
    """With RLOO's own defaults and options; the policy moves."""
    rloo = ["--trainer", "rloo", "--reward_funcs", "messages.spread", "--num_generations", "4"]
    rloo += ["--is_correction", "tis", "--importance_sampling_level", "sequence", "--beta", "0"]
    _, args, _ = train.parse_args([*argv, *rloo])
    assert isinstance(args, QuantRLOOConfig) and args.importance_sampling_level == "sequence"
    main(["train", *argv, *rloo])
    before = AutoModelForCausalLM.from_pretrained(models["student"]).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert any((before[name] != after[name]).any() for name in before)
    history = [entry for entry in read_run(tmp_path / "run").history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2]
    assert all(entry["mismatch/kl_k3"] > 1e-6 and "rewards/spread/mean" in entry for entry in history)


def test_ppo_trains_and_resumes(argv, tmp_path):
    """With one completion a prompt and a critic; from GRPO's options those that compare completions are refused."""
    ppo = ["--trainer", "ppo", "--reward_funcs", "messages.spread", "--save_steps", "1", "--beta", "0"]
    ppo += ["--steps_per_generation", "2", "--is_correction", "acr", "--value_learning_rate", "1e-3", "--lam", "0.9"]
    _, args, _ = train.parse_args([*argv, *ppo])
    assert isinstance(args, QuantPPOConfig) and (args.num_generations, args.lam, args.gamma) == (1, 0.9, 1.0)
    main(["train", *argv, *ppo])
    main(["train", *argv, *ppo, "--max_steps", "4", "--resume_from_checkpoint", "true"])
    history = [entry for entry in read_run(tmp_path / "run").history if "loss" in entry]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert all(entry["value/loss"] > 0 for entry in history) and history[2]["mismatch/kl_k3"] > 1e-6
    with pytest.raises(SystemExit, match="`scale_rewards`='group' compares the completions"):
        main(["train", *argv, *ppo, "--scale_rewards", "group"])


def test_qurls_ppo_recipe(argv, tmp_path):
    """The settings of QuRL's section 5 and of verl's quickstart: 256 completions, in four updates of 64."""
    recipe = runpy.run_path(str(ROOT / "examples/qurl_ppo.py"))["RECIPE"]
    small = ["--use_cpu", "true", "--bf16", "false", "--use_vllm", "false", "--output_dir", str(tmp_path)]
    _, args, model = train.parse_args(small, recipe)
    assert isinstance(args, QuantPPOConfig) and model.model_name_or_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert args.generation_batch_size == 256 and args.num_generations == 1 and args.uaq_scale is None
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
    assert (args.num_train_epochs, args.max_completion_length, args.is_correction) == (15, 512, "acr")
    assert (args.learning_rate, args.value_learning_rate, args.beta) == (1e-6, 1e-5, 1e-3)
    assert (args.gamma, args.lam, args.cliprange_value) == (1, 1, 0.5)
    main_of_recipe = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"]
    main_of_recipe += ["--steps_per_generation", "2", "--use_vllm", "false", "--dtype", "float32"]
    train.main([*argv, *main_of_recipe, "--reward_funcs", "messages.spread"], recipe=recipe)
    first, second = [entry for entry in read_run(tmp_path / "run").history if "loss" in entry]
    assert first["value/loss"] != second["value/loss"] and second["value/loss"] > 0 and second["kl"] > 0


def test_distillation_trains_and_resumes(argv, tmp_path, models):
    """From a file that names the trainer. What the student says comes nearer to what its teacher says."""
    recipe = {"trainer": "distillation", "teacher_model_name_or_path": models["teacher"], "save_steps": 1}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"is_correction": "tis", "teacher_precision": "nvfp4"}))
    words = [*argv, "--config", str(tmp_path / "recipe.yaml")]
    script, args, _ = train.parse_args(words)
    assert script.trainer == "distillation" and isinstance(args, QuantDistillationConfig)
    main(["train", *words, "--max_steps", "1"])
    main(["train", *words, "--max_steps", "4", "--resume_from_checkpoint", "true"])
    history = [entry for entry in read_run(tmp_path / "run").history if "loss" in entry]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert history[-1]["loss"] < history[0]["loss"] and all(entry["mismatch/kl_k3"] > 0 for entry in history)


def test_diffusion_trains(argv, tmp_path, capsys):
    """A model saved with its mask token; the completions are denoised, and the plan knows it too."""
    policy().save_pretrained(tmp_path / "masked")
    tokenizer().save_pretrained(tmp_path / "masked")
    argv[1] = str(tmp_path / "masked")
    masked = ["--trainer", "diffusion", "--reward_funcs", "messages.spread", "--num_generations", "4"]
    masked += ["--block_length", "4", "--is_correction", "ais"]
    _, args, _ = train.parse_args([*argv, *masked])
    assert isinstance(args, DiffusionGRPOConfig) and args.block_length == 4
    main(["train", *argv, *masked])
    assert "Sampling: INT4, embedded, by denoising" in capsys.readouterr().out
    history = [entry for entry in read_run(tmp_path / "run").history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2] and all(entry["mismatch/kl_k3"] > 1e-6 for entry in history)
    main(["plan", argv[1], *argv[2:], *masked])
    assert "by denoising" in capsys.readouterr().out


ASYNC = ["--trainer", "async_grpo", "--num_generations", "4", "--reward_funcs", "messages.spread"]
THREAD = [*ASYNC, "--use_vllm", "false"]


def test_async_grpo_trains_and_resumes(argv, tmp_path, capsys):
    """The `dtype` is the config's, from a file too; `ModelConfig` has none beside it. The policy is saved in it."""
    clashes = {name: config.__dataclass_fields__.keys() & ModelConfig.__dataclass_fields__ for name, config in CONFIGS}
    assert clashes == {name: {"dtype"} if name == "async_grpo" else set() for name, _ in CONFIGS}
    (tmp_path / "recipe.yaml").write_text("trainer: async_grpo\ndtype: bfloat16\nmax_staleness: 2\n")
    words = [*argv, *THREAD[2:], "--config", str(tmp_path / "recipe.yaml"), "--save_steps", "1"]
    script, args, model = train.parse_args(words)
    assert isinstance(args, QuantAsyncGRPOConfig) and (args.dtype, args.max_staleness) == ("bfloat16", 2)
    given = train.launch.model_arguments(args, model)["args"].model_init_kwargs
    assert given == {"revision": "main", "dtype": "bfloat16"} and script.trainer == "async_grpo"
    for dtype in ("float16", "float32"):
        _, args, model = train.parse_args([*words, "--dtype", dtype])
        assert train.launch.model_arguments(args, model)["args"].model_init_kwargs["dtype"] == dtype
    main(["train", *words])
    assert "Sampling: INT4, embedded" in capsys.readouterr().out
    main(["train", *words, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    assert AutoConfig.from_pretrained(tmp_path / "run").dtype == torch.bfloat16
    history = [entry for entry in read_run(tmp_path / "run").history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2, 3]
    assert all(entry["mismatch/kl_k3"] > 1e-6 and entry["rollouts/age_max"] <= 2 for entry in history)


def test_a_plan_of_a_run_that_samples_while_it_trains(argv, capsys):
    """An epoch is all prompts' groups; what no table has is said, not guessed."""
    epochs = ["--max_steps", "-1", "--num_train_epochs", "2", "--gradient_accumulation_steps", "3"]
    main(["train", *argv, *THREAD, *epochs, "--dry_run"])
    told = capsys.readouterr().out
    assert "Steps: 6, from 8 prompts. An update has 12 completions, with at most" in told
    assert "Memory: not estimated for a trainer that samples while it trains" in told and "loaded in float32" in told
    assert argv[-2] == "--rollout_precision"
    with pytest.raises(SystemExit, match="TRL's worker takes only functions of a module"):
        main(["train", *argv[:-2], *ASYNC, "--overlong_punishment", "0.5", "--dry_run"])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "grpo"),
        (["--trainer", "rloo"], "rloo"),
        (["--trainer=distillation", "--max_steps", "3"], "distillation"),
        (["--trainer", "sft"], "grpo"),
        (["--trainer"], "grpo"),
        (["--config", "nowhere.yaml"], "grpo"),
    ],
    ids=str,
)
def test_the_trainer_is_read_before_its_options(words, name):
    assert chosen_trainer(words) == name
    is_named = (words[:1] == ["--trainer"] and len(words) > 1) or words[:1] == ["--trainer=distillation"]
    assert chosen_trainer(words, {"trainer": "rloo"}) == (name if is_named else "rloo")


REWARDED = ["--trainer", "distillation", "--teacher_model_name_or_path", "{teacher}"]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--trainer", "sft"], "invalid choice: 'sft'"),
        (["--trainer", "rloo", "--loss_type", "dapo"], "unknown arguments: --loss_type dapo"),
        (["--trainer", "rloo", "--is_correction", "acr"], "`is_correction`='acr' moves the upper clip bound"),
        (["--trainer", "distillation"], "`teacher_model_name_or_path`=None: name the teacher"),
        (["--trainer", "distillation", "--num_generations", "4"], "unknown arguments: --num_generations 4"),
        ([*REWARDED, "--reward_funcs", "format"], "`reward_funcs` acts only with a trainer that has rewards"),
        ([*REWARDED, "--overlong_punishment", "0.5"], "`overlong_punishment` acts only with a trainer that has"),
        ([*REWARDED, "--is_correction", "ais"], "`is_correction`='ais' acts on advantages"),
        (
            ["--traine", "rloo", "--num_generations", "4"],
            "`trainer`='rloo' takes the options of a QuantRLOOConfig, but got those of a QuantGRPOConfig",
        ),
        (
            ["--config", "{recipe}"],
            "`trainer`='sft' is unknown. Allowed: 'grpo', 'ppo', 'rloo', 'distillation', 'diffusion', 'async_grpo'.",
        ),
        ([*THREAD, "--attn_implementation", "sdpa"], "`attn_implementation`='sdpa': TRL's asynchronous trainer loads"),
        ([*THREAD, "--eval_strategy", "steps"], "`eval_strategy`='steps': TRL's asynchronous trainer does not"),
        ([*THREAD, "--pack_sequences", "true"], "`pack_sequences`=True: TRL's asynchronous trainer packs"),
        ([*THREAD, "--dry_run", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*THREAD, "--dry_run", "--vllm_mode", "server"], "unknown arguments: --vllm_mode server"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_a_model_is_loaded(argv, models, extra, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text("trainer: sft\n")
    places = {"{teacher}": models["teacher"], "{recipe}": str(tmp_path / "recipe.yaml")}

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    with pytest.raises(SystemExit) as error:
        main(["train", *argv, *(places.get(word, word) for word in extra)])
    assert says in f"{error.value.code}{capsys.readouterr().err}"


def test_help_lists_the_options_of_the_trainer(capsys):
    listed = {}
    for trainer in trl_configs():
        with pytest.raises(SystemExit):
            main(["train", "--trainer", trainer, "--help"])
        listed[trainer] = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    assert {"loss_type", "importance_sampling_level"} <= listed["grpo"] and "teacher_precision" not in listed["grpo"]
    assert "importance_sampling_level" in listed["rloo"] and "loss_type" not in listed["rloo"]
    assert {"teacher_precision", "teacher_model_name_or_path"} <= listed["distillation"]
    assert not {"num_generations", "importance_sampling_level"} & listed["distillation"]
    assert {"block_length", "tokens_per_step", "loss_type"} <= listed["diffusion"]
    assert not {"block_length", "tokens_per_step"} & listed["grpo"]


def test_plans(argv, models, capsys):
    """Steps of a generation are the trainer's own; what was not estimated is said."""
    options = argv[2:]
    main(["plan", models["student"], *options, "--max_steps", "-1", "--trainer", "rloo", "--num_generations", "4"])
    told = capsys.readouterr().out
    assert "Steps: 24, from 8 prompts. A generation has 4 completions of 1 prompts" in told and "  peak" in told
    assert "reference" in told  # RLOO's `beta` is 0.05 by default
    distilled = ["--trainer", "distillation", "--teacher_model_name_or_path", models["teacher"]]
    main(["plan", models["student"], *options, "--max_steps", "-1", *distilled, "--gradient_accumulation_steps", "2"])
    told = capsys.readouterr().out
    assert "Steps: 3, from 8 prompts. A generation has 8 completions of 8 prompts" in told
    assert "Memory: not estimated with a teacher" in told and "reference" not in told
