"""A plan of a run: its steps and its refusals against those of training, and the commands that print it."""

import json
import re
import socket
import threading
import time

import pytest
import torch
import training
from datasets import load_dataset
from tiny import save_tiny, tiny_tokenizer
from transformers import Blip2Processor, BlipImageProcessorPil, Gemma2PreTrainedModel, GPT2Config, GPT2LMHeadModel

import trl_quant.cli.train as train
from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main
from trl_quant.report.memory import Shape
from trl_quant.report.plan import make_plan, memory_of_machine, number_of_steps


# Steps and prompts


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        (8, {"num_train_epochs": 2}),
        (7, {"num_train_epochs": 1.5, "num_iterations": 2}),
        (9, {"num_train_epochs": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}),
        (8, {"num_train_epochs": 1, "steps_per_generation": 3, "gradient_accumulation_steps": 2}),
        (8, {"max_steps": 3}),
    ],
)
def test_the_number_of_steps_is_the_trainers(tmp_path, prompts, settings):
    if settings.get("per_device_train_batch_size") == 4:
        settings |= {"num_generations": 4}
    args = training.config(QuantGRPOConfig, tmp_path, **{"max_steps": -1, "max_completion_length": 1} | settings)
    trainer = training.make(QuantGRPOTrainer, args, train_dataset=training.dataset(prompts))
    trainer.train()
    assert number_of_steps(args, prompts) == trainer.state.global_step > 0


# The commands


def test_plan_and_dry_run_tell_the_same(model_dir, options, capsys, unloaded):
    quantized = ["--rollout_precision", "int4", "--use_peft", "true"]
    main(["plan", model_dir, *options, *quantized])
    planned = capsys.readouterr().out
    main(["train", "--model_name_or_path", model_dir, *options, *quantized, "--dry_run", "true"])
    assert capsys.readouterr().out == planned
    for part in (
        "Sampling: INT4, embedded",
        "Steps: 24, from 8 prompts",
        "policy",
        "engine",
        "not measured",
        "no obstacle",
    ):
        assert part in planned
    assert "GSM8K" not in planned and "nothing is quantized" not in planned


def test_a_stream_has_no_longest_prompt(tmp_path):
    rows = training.dataset(8).to_iterable_dataset()
    args = training.config(QuantGRPOConfig, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="is a stream, of which a plan cannot know the longest prompt"):
        make_plan("nowhere", args, None, rows)


def test_a_run_without_a_length_is_planned_all_the_same(model_dir, options, capsys, unloaded):
    at = options.index("--max_completion_length") + 1
    main(["plan", model_dir, *options[:at], "none", *options[at + 1 :], "--rollout_precision", "int4"])
    told = capsys.readouterr().out
    assert re.search(r"with at most \d+ \+ any number of tokens", told)
    assert "Memory: not estimated without a `max_completion_length`" in told
    assert "Cost against BF16: not measured without a `max_completion_length`" in told


@pytest.mark.parametrize(
    "base", [["--rollout_precision", "int8", "--load_in_8bit", "true"], ["--train_precision", "nf4"]]
)
def test_no_memory_is_told_of_a_base_in_bitsandbytes(model_dir, options, capsys, unloaded, base):
    """The model's shape tells the memory of its weights in 16 and 32 bits, and in our own codes."""
    main(["plan", model_dir, *options, "--use_peft", "true", *base])
    told = capsys.readouterr().out
    assert "Memory: not estimated with a base that bitsandbytes holds" in told and "peak" not in told


def test_no_memory_is_told_of_layers_that_are_not_linear(options, capsys, unloaded, tmp_path):
    """TRL trains them without a `rollout_precision`, as the refusal of one says."""
    config = GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=257)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    main(["plan", str(tmp_path), *options])
    told = capsys.readouterr().out
    assert "Memory: not estimated for a model with other layers than `nn.Linear`" in told and "peak" not in told
    assert Shape.of(model.config).parameters == sum(p.numel() for p in model.parameters())


def test_a_mixture_is_planned_with_all_its_experts(options, capsys, unloaded, tmp_path):
    """And offered no change that its run would be refused with."""
    path = save_tiny(tmp_path / "model", "qwen3_moe")
    main(["plan", path, *options, "--rollout_precision", "int8"])
    told = capsys.readouterr().out
    assert "0.00 billion parameters, 0.00 of which compute a token, loaded" in told and ": fits" in told
    assert "experts   counted for 2 a token in `work`, which no run has measured" in told
    with pytest.raises(SystemExit):
        main(["plan", path, *options, "--rollout_precision", "int8", "--card", "0.9"])
    told = capsys.readouterr().out
    assert "does not fit" in told and "`train_precision`" not in told


PADDED = {  # family, settings of its config, options
    "capped logits": ("gemma2", {}, []),
    "dropout of its config": ("qwen3", {"attention_dropout": 0.1}, []),
    "dropout of the run": ("qwen3", {}, ["--model_init_kwargs", '{"attention_dropout": 0.1}']),
    "noise": ("qwen3", {}, ["--neftune_noise_alpha", "5"]),
    "eager": ("qwen3", {}, ["--attn_implementation", "eager"]),
    "flash": ("qwen3", {}, ["--attn_implementation", "flash_attention_2"]),
    "images": ("qwen3", {}, []),
}
PACKED = {
    "nothing": ("qwen3", {}, []),
    "sdpa": ("qwen3", {}, ["--attn_implementation", "sdpa"]),
    "dropout that the run switches off": (
        "qwen3",
        {"attention_dropout": 0.1},
        ["--model_init_kwargs", '{"attention_dropout": 0.0}'],
    ),
}
# From 5.24 on, transformers computes Gemma 2's attention by `eager` alone, also without its cap
(PACKED if Gemma2PreTrainedModel._supports_sdpa else PADDED)["a cap that the run switches off"] = (
    "gemma2",
    {},
    ["--model_init_kwargs", '{"attn_logit_softcapping": null}'],
)


@pytest.mark.parametrize("case", [*PADDED, *PACKED])
def test_memory_of_prompts_is_what_the_run_computes(options, capsys, unloaded, tmp_path, monkeypatch, case):
    """Each completion has its own where rows are padded, or their attention shares none. Else it is less."""
    family, sizes, own = (PADDED | PACKED)[case]
    path = save_tiny(tmp_path / "model", family, hidden_size=256, vocab_size=512, **sizes)
    if case == "images":
        Blip2Processor(BlipImageProcessorPil(), tiny_tokenizer()).save_pretrained(path)
    long = [{"prompt": "1" * 2000, "answer": "1"}] * 8
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    taken, once = [], []  # and what the cost is told
    monkeypatch.setattr("trl_quant.report.plan.cost", lambda *given: once.append(given[-1]))
    for packs in ([], ["--pack_sequences", "false"]):
        main(["plan", path, *options, "--rollout_precision", "int4", *own, *packs])
        taken.append(float(re.search(r"checkpoints ([\d.]+)", capsys.readouterr().out)[1]))
    assert (taken[0] == taken[1]) == (case in PADDED) and taken[1] > 0
    assert once == [case not in PADDED, False]


def test_the_card_is_the_one_that_is_named(model_dir, options, capsys, unloaded):
    with pytest.raises(SystemExit) as ended:
        main(["plan", model_dir, *options, "--card", "0.5"])
    told = capsys.readouterr().out
    assert ended.value.code == 1 and "with 0.5 GB" in told and "does not fit" in told
    main(["plan", model_dir, *options, "--card", "80"])
    assert ": fits" in capsys.readouterr().out
    for card in ("-1", "inf", "nan"):
        with pytest.raises(SystemExit, match=f"`--card`={card} is out of range"):
            main(["plan", model_dir, *options, "--card", card])


def test_the_model_may_be_named_as_in_training(model_dir, options, capsys, unloaded, tmp_path):
    """With the very options of a run, on the command line or in its file; or first, beside what the command adds."""
    main(["plan", model_dir, *options])
    planned = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {model_dir}\n")
    for argv in (
        ["--model_name_or_path", model_dir, *options],
        [*options, f"--model_name_or_path={model_dir}"],
        ["--config", str(tmp_path / "run.yaml"), *options],
        ["--card", str(memory_of_machine() / 10**9), model_dir, *options],
    ):
        main(["plan", *argv])
        assert capsys.readouterr().out == planned, argv
    with pytest.raises(SystemExit, match="`model_name_or_path`=None"):
        main(["plan", *options])
    for twice in (["plan", "other", "--model_name_or_path", model_dir], ["plan", *options, model_dir]):
        with pytest.raises(SystemExit, match="2"):
            main(twice)


WRONG = [
    ["--rollout_precision", "int3"],
    ["--rollout_precision", "int4", "--is_cap", "0.5"],
    ["--rollout_precision", "int4", "--num_generations", "64", "--generation_batch_size", "1024"],
    ["--train_precision", "nf4"],
    ["--train_precision", "nvfp4", "--rollout_precision", "int8"],
    ["--rollout_precision", "int8", "--reward_funcs", "gsm8k", "nothing"],
    ["--train_precision", "nvfp4", "--use_peft", "--load_in_4bit", "true"],
    ["--train_precision", "nvfp4", "--use_peft", "--use_dora"],
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong))
def test_a_wrong_option_is_refused_as_in_training(model_dir, options, wrong):
    told = []
    for command in (["plan", model_dir], ["train", "--model_name_or_path", model_dir]):
        with pytest.raises(SystemExit) as error:
            main([*command, *options, *wrong])
        told.append(str(error.value))
    assert told[0] == told[1] and told[0].startswith("error: ")


@pytest.mark.vllm
def test_a_plan_needs_no_server(model_dir, options, capsys, unloaded, monkeypatch):
    """It is printed at once, with the fault of this machine; a dry run prints it, and ends as the run would."""
    pytest.importorskip("vllm")
    monkeypatch.setattr("trl_quant.rollout.vllm.support.check_version", lambda: None)
    sleep, own = time.sleep, threading.get_ident()

    def sleep_elsewhere(seconds: float) -> None:
        assert threading.get_ident() != own, "it waits for the server"
        sleep(seconds)  # a thread that another test left

    monkeypatch.setattr("time.sleep", sleep_elsewhere)
    server = ["--rollout_precision", "int8", "--use_vllm", "true", "--vllm_mode", "server"]
    with socket.create_server(("localhost", 0)) as closed:  # nothing listens there afterwards
        server += ["--vllm_server_base_url", f"http://localhost:{closed.getsockname()[1]}"]
    main(["plan", model_dir, *options, *server])
    told = capsys.readouterr().out
    assert "Steps: 24" in told and "peak" in told
    assert "This machine: it cannot. The vLLM server at" in told and "api_server --model" in told
    with pytest.raises(SystemExit, match=r"error: The vLLM server at .* can't be reached"):
        argv = ["--model_name_or_path", model_dir, *options, *server, "--vllm_server_timeout", "0"]
        main(["train", *argv, "--dry_run", "true"])
    assert "Steps: 24" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 may run there")
def test_what_this_machine_lacks_ends_a_dry_run_alone(model_dir, options, capsys, unloaded):
    """A plan is for any machine, and says it; a dry run of training ends there with the same words."""
    quantized = ["--rollout_precision", "fp8", "--use_vllm", "true"]
    main(["plan", model_dir, *options, *quantized, "--card", "80"])
    told = capsys.readouterr().out
    assert "vLLM in the training process" in told and "engine 24" in told
    lacking = told.partition("This machine: it cannot. ")[2].strip()
    assert "vLLM" in lacking
    with pytest.raises(SystemExit) as error:
        main(["train", "--model_name_or_path", model_dir, *options, *quantized, "--dry_run", "true"])
    assert str(error.value) == f"error: {lacking}" and "it cannot" in capsys.readouterr().out


def test_without_a_gpu_bf16_is_planned_all_the_same(model_dir, options, capsys, monkeypatch, unloaded):
    at = options.index("--use_cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args, **kwargs: False)
    main(["plan", model_dir, *options[:at], *options[at + 2 :]])
    assert "Steps: 24" in capsys.readouterr().out


def test_defaults_are_said(model_dir, options, capsys, monkeypatch, unloaded):
    """With neither a precision nor a dataset two lines, with both none."""
    asked = []

    def load(name, split, config, tokenizer, instruction):
        asked.append(name)
        return load_dataset("json", data_files=options[1], split="train")

    monkeypatch.setattr(train.launch, "load_prompts", load)
    main(["plan", model_dir, *options[2:]])
    told = capsys.readouterr().out
    assert asked == ["openai/gsm8k"] and told.count("the run trains on openai/gsm8k") == 1
    assert told.count("nothing is quantized") == 1
    main(["plan", model_dir, *options, "--rollout_precision", "int8"])
    told = capsys.readouterr().out
    assert asked[1:] == [options[1]] and not re.search("trains on|nothing is quantized", told)
