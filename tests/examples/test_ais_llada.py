"""The recipe for AIS on LLaDA has the paper's settings; the small model is taught, and the recipe trains it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from papers import AIS
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trl_quant.cli import train as command
from trl_quant.report.plan import make_plan
from trl_quant.report.runs import read_run
from trl_quant.rollout.embedded.diffusion import denoise


sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks" / "study")]

import ais_llada  # noqa: E402
import build_masked_model as building  # noqa: E402
import trial  # noqa: E402
from cell import Cell  # noqa: E402


# AIS, section 4.3 and appendix C; beta and the updates of a generation are d1's
PAPER = AIS | {
    "block_length": 32,
    "tokens_per_step": 2,
    "prompt_mask_probability": 0.15,
    "max_completion_length": 256,
    "beta": 0.04,
    "num_generations": 8,
    "num_iterations": 12,
    "mask_draws": 12,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "max_grad_norm": 0.2,
    "max_steps": 7700,
}


def test_the_recipe_has_the_papers_settings():
    # One process takes the completions of eight
    alone = ["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "16"]
    script, args, model = command.parse_args(alone, ais_llada.RECIPE)
    assert {name: getattr(args, name) for name in PAPER} == PAPER
    assert 1e-6 <= args.learning_rate <= 3e-6 and model.lora_r == 128
    assert model.lora_dropout == 0  # the sampler has none
    rows, parts = (ais_llada.RECIPE[name] for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    assert 8 * rows * parts == args.generation_batch_size == 96
    assert script.reward_funcs == ["gsm8k", "format"]


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("masked")
    building.build(building.BuildArguments(str(path), max_steps=40, train_problems=32, eval_problems=16))
    return path


@pytest.mark.long
@pytest.mark.slow
def test_teaching_teaches(taught):
    """After 40 steps it knows what every answer begins with, and still attends in both directions."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(taught), AutoTokenizer.from_pretrained(taught)
    assert model.config.is_causal is False
    rows = [json.loads(line) for line in (taught / "eval.jsonl").read_text().splitlines()]
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    shown = torch.nn.functional.pad(prompts, (0, building.LENGTH), value=tokenizer.mask_token_id)
    with torch.no_grad():
        chances = model(input_ids=shown).logits[:, prompts.shape[1]].softmax(-1)
    assert (chances[:, tokenizer.convert_tokens_to_ids("####")] > 0.5).all()


@pytest.mark.parametrize(("right", "steps"), [([0.1, 0.4, 0.9], 4), ([0.1, 0.2, 0.3], 5)])
def test_teaching_stops_once_a_third_is_right(tmp_path, monkeypatch, right, steps):
    """It judges the model after every second step here, and after the last."""
    made, answers, loss = [], iter(right), building.masked_loss
    monkeypatch.setattr(building, "EVAL_STEPS", 2)
    monkeypatch.setattr(building, "accuracy", lambda *args: next(answers))
    monkeypatch.setattr(building, "masked_loss", lambda *args: made.append(1) or loss(*args))
    settings = {"max_steps": 5, "batch_size": 4, "train_problems": 8, "eval_problems": 8}
    found = building.build(building.BuildArguments(str(tmp_path), **settings))
    assert len(made) == steps and found == right[-(-steps // 2) - 1]
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "eval.jsonl").is_file()


@pytest.mark.long
def test_the_study_judges_by_denoising(taught):
    """It returns the share of right sums. Each seed draws other answers, and the global random state stays as it is."""
    model, settings = AutoModelForCausalLM.from_pretrained(taught), Cell("", trainer="diffusion").settings()
    judge, state = trial.accuracy_of(settings, None, taught), torch.random.get_rng_state()
    with torch.no_grad():
        model.lm_head.weight.mul_(0)  # every token is as likely as another
    canvases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "denoise", lambda *args: canvases.append(denoise(*args)) or canvases[-1])
        assert [judge(model), judge(model, seed=1), judge(model)] == [0, 0, 0]
        assert torch.equal(canvases[0], canvases[2]) and not torch.equal(canvases[0], canvases[1])
        tokenizer = AutoTokenizer.from_pretrained(taught)
        solutions = [json.loads(line)["answer"] for line in (taught / "eval.jsonl").read_text().splitlines()]
        right = tokenizer([f"#### {answer}" for answer in solutions], padding=True, return_tensors="pt")["input_ids"]
        right[::2] = tokenizer.eos_token_id
        patch.setattr(building, "denoise", lambda *args: right)
        assert judge(model) == 0.5
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.slow
def test_the_recipe_trains_the_small_model(taught, tmp_path):
    options = {"model_name_or_path": taught, "dataset_name": taught / "train.jsonl", "output_dir": tmp_path}
    options |= {
        "reward_funcs": "training.spread",
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "report_to": "none",
    }
    argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    ais_llada.main(["--config", str(ROOT / "examples/laptop_diffusion.yaml"), *argv], recipe=ais_llada.RECIPE)
    first, second = [log for log in read_run(tmp_path).history if "loss" in log]
    assert first["ais/alpha"] > 0 and first["grad_norm"] > 0 and second["grad_norm"] > 0
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_dry_run_plans(taught, tmp_path, capsys, monkeypatch):
    """Nothing is trained. The copy's weights are counted: 32 bits each, or codes where a GPU multiplies them."""
    plans = []
    monkeypatch.setattr(command, "make_plan", lambda **given: plans.append(make_plan(**given)) or plans[-1])
    for precision in ("int4", "int8"):
        options = {"model_name_or_path": taught, "dataset_name": taught / "train.jsonl", "output_dir": tmp_path / "run"}
        options |= {"reward_funcs": "training.spread", "rollout_precision": precision, "dry_run": "true"}
        argv = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        ais_llada.main(["--config", str(ROOT / "examples/laptop_diffusion.yaml"), *argv], recipe=ais_llada.RECIPE)
        said = capsys.readouterr().out
        assert f"Sampling: {precision.upper()}, embedded, by denoising" in said and "Steps: 60, from 32 prompts" in said
    assert not (tmp_path / "run").exists()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(taught))
    linear = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight"))
    copies = [plan.memory.held["engine"] for plan in plans]
    assert copies[0] - copies[1] == 3 * linear and copies[1] > linear > 0
