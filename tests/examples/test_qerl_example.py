"""QeRL's recipe runs as it stands on the small model, all of it, and options change it."""

import json
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from places import EXAMPLES
from trl import ModelConfig

from trl_quant import QuantGRPOConfig
from trl_quant.cli.train import TrainArguments, parse_args
from trl_quant.corrections import CorrectionInputs


sys.path.insert(0, str(EXAMPLES))

import build_arithmetic_model as building
import qerl


pytestmark = pytest.mark.isa

# What a CPU needs, and a short run
ON_A_CPU = """--use_vllm false --use_cpu --dtype float32 --bf16 false --optim adamw_torch --gradient_checkpointing false
    --report_to none --disable_tqdm true --reward_funcs arithmetic --learning_rate 1e-3 --max_completion_length 10
    --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --max_steps 6 --num_iterations 2 --noise_stages 3
    --save_strategy no"""


def test_every_name_of_the_recipe_is_an_option():
    options = {f.name for kind in (TrainArguments, QuantGRPOConfig, ModelConfig) for f in fields(kind)}
    assert not qerl.RECIPE.keys() - options


def test_the_old_policy_is_the_papers_or_the_releases():
    """The noised sampler, or the trainer: one option, which the docstring names."""
    proximal, rollout, old = {}, torch.full((1, 2), -1.0), torch.full((1, 2), -1.5)
    for option in ("", "--is_correction none"):
        words = [*ON_A_CPU.split(), "--lora_sync", "merge", *option.split()]
        _, args, _ = parse_args(words, qerl.RECIPE)
        output = args.correction()(CorrectionInputs(rollout, old, torch.ones(1), torch.ones(1, 2)))
        proximal[option] = old if output.old_logps is None else output.old_logps
        assert (output.weights == 1).all() and option in qerl.__doc__
    assert torch.equal(proximal[""], rollout) and torch.equal(proximal["--is_correction none"], old)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Six steps of the script, with a YAML file beside the command line."""
    path, patch = tmp_path_factory.mktemp("qerl"), pytest.MonkeyPatch()
    model = path / "model"
    sizes = {"max_steps": 2, "batch_size": 8, "train_problems": 32, "eval_problems": 16}
    building.build(building.BuildArguments(output_dir=str(model), **sizes))
    (path / "changes.yaml").write_text(yaml.safe_dump({"lora_r": 16, "seed": 3}))
    options = f"""--config {path}/changes.yaml --model_name_or_path {model} --dataset_name {model}/train.jsonl
        --output_dir {path}/out {ON_A_CPU}"""
    patch.setattr(sys, "argv", ["qerl.py", *options.split()])
    runpy.run_path(str(EXAMPLES / "qerl.py"), run_name="__main__")
    patch.undo()
    return path / "out"


def test_the_recipe_runs(run):
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    generations = [log for log in history if "reward" in log]
    assert [log["step"] for log in generations] == [1, 3, 5]
    assert [log["noise/sigma"] for log in generations] == pytest.approx([0, 1e-2, 5e-4])
    clean, noised, _ = (log["sampling/sampling_logp_difference/mean"] for log in generations)
    assert clean < 1e-5 < 1e-4 < noised  # trainer and sampler are one policy, until the noise
    assert all(log["sampling/importance_sampling_ratio/mean"] == 1 for log in generations)  # the noised one is the old
    assert all(-1 <= log["rewards/soft_overlong_punishment_reward/mean"] < 0 for log in generations)
    assert all("dynamic_sampling/wasted_tokens" in log for log in generations)


def test_options_change_the_recipe(run):
    adapter = json.loads((run / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (16, 64)
    assert {*adapter["target_modules"]} == {*qerl.RECIPE["lora_target_modules"]}
    args = torch.load(run / "training_args.bin", weights_only=False)
    assert args.seed == 3 and args.max_steps == 6
    unchanged = {name for name in qerl.RECIPE if hasattr(args, name) and f"--{name} " not in ON_A_CPU} - {"output_dir"}
    assert len(unchanged) > 12
    assert all(getattr(args, name) == qerl.RECIPE[name] for name in unchanged)
