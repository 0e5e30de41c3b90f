"""A plan of a run: its memory against what was measured, its steps and its refusals against those of training."""

import json
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
import training
from datasets import load_dataset
from peft import LoraConfig
from tiny import save_tiny, tiny_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import trl_quant.cli.train as train
from trl_quant import DiffusionGRPOConfig, QuantGRPOConfig, QuantGRPOTrainer, QuantRLOOConfig
from trl_quant.cli import main
from trl_quant.report import measured
from trl_quant.report.memory import Shape, estimate
from trl_quant.report.plan import longest_prompt, number_of_steps
from trl_quant.rollout.embedded.diffusion import Schedule, denoise


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))
from diffusion import SHAPES as DIFFUSION_SHAPES  # noqa: E402
from engines import SHAPES  # noqa: E402


CARDS = {"H200": 143_771 << 20, "H100": 81_559 << 20}  # bytes, as nvidia-smi tells them
PROMPT = 256  # tokens, in every benchmark
WITHIN = 0.10


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}-NVIDIA-H200.json").read_text())


def shape_of(size: str, rank: int) -> Shape:
    """Of the benchmarks' model."""
    sizes = dict(SHAPES[size])
    config = Qwen2Config(
        vocab_size=152064,
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=sizes.pop("kv_heads"),
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        **sizes,
    )
    return Shape.of(config, LoraConfig(r=rank, target_modules="all-linear") if rank else None)


@pytest.fixture(scope="module")
def shapes() -> dict[tuple[str, int], Shape]:
    found = {(size, 32): shape_of(size, 32) for size in ("3b", "7b", "14b", "32b", "70b")}
    return found | {("7b", 0): shape_of("7b", 0)}


@pytest.fixture
def estimated(shapes, tmp_path):
    """Bytes that torch holds while it trains, by the benchmark's settings."""

    def of(size: str, rank: int = 32, card: str = "H200", kind: type = QuantGRPOConfig, **settings):
        args = kind(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **settings)
        args.resolve_for(adapted=rank > 0)
        return estimate(args, shapes[size, rank], torch.bfloat16, PROMPT, CARDS[card])

    return of


def held(memory) -> int:
    return sum(memory.held.values())


def while_training(memory) -> int:
    return held(memory) + sum(memory.training.values())


def near(estimate: int, figure: int) -> bool:
    print(f"estimated {estimate / 1e9:.2f} GB, measured {figure / 1e9:.2f} GB: {estimate / figure - 1:+.1%}")
    return abs(estimate / figure - 1) <= WITHIN


# Memory


def shape_counts(size: str) -> tuple[int, int]:
    """Parameters of Qwen2.5's linear layers, and the rest, counted by hand."""
    s = SHAPES[size]
    hidden, wide, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    pairs = hidden // s["heads"] * s["kv_heads"]
    linear = layers * (2 * hidden * hidden + 2 * hidden * pairs + 3 * hidden * wide)
    return linear, 2 * 152064 * hidden + layers * (hidden + 2 * pairs + 2 * hidden) + hidden


@pytest.mark.parametrize("size", ["3b", "7b", "70b"])
def test_a_models_parameters_are_counted(shapes, size):
    shape, sizes = shapes[size, 32], SHAPES[size]
    assert (shape.linear, shape.other) == shape_counts(size)
    ends = 6 * sizes["hidden_size"] + 2 * sizes["hidden_size"] // sizes["heads"] * sizes["kv_heads"]
    ends += 3 * (sizes["hidden_size"] + sizes["intermediate_size"])
    assert shape.adapter == 32 * ends * sizes["num_hidden_layers"]
    assert (shape.wide, shape.hidden) == (sizes["intermediate_size"], sizes["hidden_size"])


@pytest.mark.parametrize("size", ["32b", "70b"])
def test_memory_of_whole_steps_on_a_frozen_base(shapes, estimated, size):
    """
    Every figure of `benchmarks/memory.py`, but for what torch reserved before the first step: it kept blocks that it
    had freed, up to the cap of the run, which no model's shape tells.
    """
    result = read("memory-32b-70b")
    given, row = result["arguments"], result["results"][size]["nvfp4"]
    tokens = given["batch"] * (given["prompt"] + given["new"])
    cache = int(1.1 * tokens * 2 * shapes[size, 32].token)
    memory = estimated(
        size,
        num_generations=given["generations"],
        per_device_train_batch_size=given["micro"],
        gradient_accumulation_steps=given["batch"] // given["micro"],
        max_completion_length=given["new"],
        train_precision="nvfp4",
        is_correction=given["correction"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_engine_kwargs={"kv_cache_memory_bytes": cache},
    )
    assert memory.peak == while_training(memory)
    before = held(memory) - memory.held["optimizer"]
    assert near(before, row["start"]["allocated"])
    for kind in ("allocated", "reserved"):
        assert near(memory.peak, row["steps"][kind])
    assert near(memory.card, row["steps"]["reserved"] + row["steps"]["beside"])
    assert not near(memory.peak - memory.held["policy"] // 4, row["steps"]["allocated"])  # the bound can fail


@pytest.mark.parametrize("name", ["3b", "7b", "14b", "32b"])
def test_memory_of_an_update(estimated, name):
    for size, kinds in read(f"update-{name}")["results"].items():
        for kind, rows in kinds.items():
            for tokens, row in rows.items():
                sequences = int(tokens) // 2048
                ours = {} if kind in ("trl", "bf16") else {"train_precision": kind}
                memory = estimated(
                    size,
                    num_generations=max(sequences, 2),
                    per_device_train_batch_size=sequences,
                    gradient_accumulation_steps=1 if sequences > 1 else 2,
                    max_completion_length=2048 - PROMPT,
                    **ours,
                )
                assert near(while_training(memory), row["peak_bytes"]), (kind, tokens)


def runs_of_steps() -> list:
    """
    (file, arguments, size, rank, micro-batch, trainer, shape, bytes) of every step that was measured, but PPO's, whose
    memory is not estimated.
    """
    found = []
    for path in sorted(RESULTS.glob("step-*.json")):
        content = json.loads(path.read_text())
        if "lengths" in content:  # as `step.py` writes now
            for run in content["runs"]:
                method, _, name = run["trainer"].removesuffix("/exact").rpartition(":")
                if method == "ppo":
                    continue
                given = content["arguments"] | {"lengths": content["lengths"], "method": method} | run
                rollout, _, train = name.partition("/")
                train, _, lora_sync = train.partition("/")
                given |= {"train_precision": train or None, "lora_sync": lora_sync or None}
                for shape, result in run["results"].items():
                    place = (path.name, given, run["size"], given["lora"], run["micro"], rollout, shape)
                    found.append((*place, result["peak_bytes"]))
            continue
        for run in content.get("runs", [content]):
            given = run["arguments"]
            for size, results in run["results"].items():
                policies = {name: rows for name, rows in results.items() if "micro-batches" in name}
                for policy, trainers in (policies or {"": results}).items():
                    rank, micro = given.get("lora", 32), given.get("micro", 16)
                    if policy:
                        rank, micro = (32, 16) if "LoRA" in policy else (0, 8)
                    for trainer, rows in trainers.items():
                        for shape, row in rows.items():
                            figure = row["peak_bytes"]
                            found.append((path.name, given, size, rank, micro, trainer.split()[0], shape, figure))
    return found


@pytest.mark.parametrize("run", runs_of_steps(), ids=lambda run: f"{run[0].removesuffix('.json')} {run[5]} {run[6]}")
def test_memory_of_a_step(estimated, run):
    _, given, size, rank, micro, kind, shape, figure = run
    completions, new = map(int, shape.partition(" ")[0].split("x"))
    if kind != "trl" and "lognormal" in shape:  # packed rows hold each prompt of a micro-batch once, and no padding
        steps = [sum(each) for each in given["lengths"][shape]]
        prompts = completions // given["generations"] * given["prompt"]
        new = (max(steps) + prompts) // completions - given["prompt"]
    settings = {"optim": "adamw_torch_fused" if rank else "sgd"}
    if kind != "trl":
        settings |= {"rollout_precision": kind, "train_precision": given.get("train_precision")}
        if given.get("lora_sync") == "adapter":
            settings["lora_sync"] = "adapter"
    (card,) = (card for card in CARDS if card in run[0])
    memory = estimated(
        size,
        rank,
        card,
        QuantRLOOConfig if given.get("method") == "rloo" else QuantGRPOConfig,
        num_generations=given["generations"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        max_completion_length=new,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=given["vllm_gpu_memory_utilization"],
        **settings,
    )
    assert near(while_training(memory), figure)


def denoiser(**sizes) -> LlamaConfig:
    return LlamaConfig(is_causal=False, architectures=["LlamaForCausalLM"], **sizes)


def while_denoising(path: Path, config: LlamaConfig, prompt: int, rows: int, rank: int = 0, **settings):
    adapter = LoraConfig(r=rank, target_modules="all-linear") if rank else None
    micro = settings.setdefault("per_device_train_batch_size", rows)
    args = DiffusionGRPOConfig(
        output_dir=path,
        use_cpu=True,
        bf16=True,
        report_to=[],
        gradient_accumulation_steps=rows // micro,
        mask_token_id=4,
        **settings,
    )
    args.resolve_for(adapted=rank > 0)
    return estimate(args, Shape.of(config, adapter), torch.bfloat16, prompt, CARDS["H100"])


@pytest.mark.parametrize("name", ["-NVIDIA-H200", "-NVIDIA-H100", "-8-generations-NVIDIA-H100"])
def test_memory_of_a_masked_diffusion_step(tmp_path, name):
    found = json.loads((RESULTS / f"diffusion-8b{name}.json").read_text())
    given, sizes = found["arguments"], DIFFUSION_SHAPES["8b"]
    config = denoiser(vocab_size=128832, **sizes)  # the tokenizer's, in whole blocks of 64
    for run in found["runs"]:
        for shape, result in run["results"].items():
            memory = while_denoising(
                tmp_path,
                config,
                given["prompt"],
                int(shape.partition("x")[0]),
                given["lora"],
                rollout_precision=run["trainer"],
                num_generations=given["generations"],
                per_device_train_batch_size=run["micro"],
                max_completion_length=given["new"],
                beta=given["beta"],
            )
            assert near(memory.peak, result["peak_bytes"])


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators have returned and that still live."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.sizes:
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
        self.peak = max(self.peak, sum(self.sizes.values()))
        return found


@pytest.mark.parametrize(("rows", "wide", "vocabulary"), [(16, 2048, 64), (64, 768, 64), (16, 768, 8192)])
def test_memory_of_denoising(tmp_path, monkeypatch, rows, wide, vocabulary):
    """Against the tensors that live while a small model samples, whether its MLP or its logits take most."""
    sizes = {"hidden_size": 256, "intermediate_size": wide, "num_hidden_layers": 2, "num_attention_heads": 4}
    config, prompt, length, block = denoiser(vocab_size=vocabulary, **sizes), 32, 64, 16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompts = torch.randint(5, vocabulary, (rows, prompt))
    live = Live()
    live.sizes |= {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}
    with live:
        denoise(model, prompts, torch.ones_like(prompts), Schedule(length, block, 8, 1.0), 4, [3])
    settings = {"rollout_precision": "bf16", "max_completion_length": length, "block_length": block}
    found = while_denoising(tmp_path, config, prompt, rows, num_generations=rows, **settings)
    assert found.sampling["denoising"] == pytest.approx(live.peak, rel=0.02)
    # A generation of any size is denoised in parts
    monkeypatch.setattr("trl_quant.report.memory.TOKENS_AT_ONCE", rows // 4 * (prompt + length))
    parts = while_denoising(tmp_path, config, prompt, rows, num_generations=rows, **settings)
    assert parts.sampling["denoising"] == found.sampling["denoising"] // 4


def test_parts_follow_the_settings(shapes, tmp_path):
    """Each part is what the settings say, by hand, in FP32 and BF16, and comes and goes with them."""

    def parts(rank: int = 32, dtype=torch.bfloat16, **settings) -> dict[str, int]:
        batch = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 44}
        args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **batch | settings)
        memory = estimate(args, shapes["7b", rank], dtype, 20, 80 * 10**9)
        return memory.held | memory.training | memory.sampling

    shape = shapes["7b", 32]
    full, adapted = parts(rank=0, dtype=torch.float32), parts()
    assert full["policy"] == full["gradients"] == full["optimizer"] // 2 == 4 * shape.parameters
    assert adapted["policy"] == 2 * shape.parameters and adapted["adapter"] == 4 * shape.adapter
    assert adapted["optimizer"] == 2 * adapted["gradients"] == 8 * shape.adapter
    assert "reference" not in parts(rank=0) and "reference" not in parts(beta=0.1)
    assert parts(rank=0, beta=0.1)["reference"] == 2 * shape.parameters
    assert parts(rank=0, optim="adafactor")["optimizer"] == 0
    assert parts(rank=0, optim="adamw_bnb_8bit")["optimizer"] == 2 * shape.parameters

    assert adapted["engine"] == 0 and adapted["cache"] == 8 * 64 * 2 * shape.token // 4
    assert parts(rollout_precision="int8")["engine"] == 2 * shape.parameters
    assert parts(rollout_precision="fp8_block")["engine"] == 4 * shape.linear + 2 * shape.other
    assert parts(train_precision="nvfp4")["engine"] == 0
    assert parts(train_precision="nvfp4")["policy"] == shape.linear * 4.5 / 8 + 2 * shape.other
    assert parts(train_precision="int8")["codes"] == shape.linear
    colocated = {"rollout_precision": "fp8", "use_vllm": True, "vllm_mode": "colocate"}
    assert parts(**colocated)["engine"] == 24 * 10**9 and parts(**colocated)["cache"] == 0
    assert parts(**colocated | {"vllm_mode": "server"})["engine"] == 0
    given = parts(**colocated, vllm_engine_kwargs={"kv_cache_memory_bytes": 10**9})
    assert given["engine"] == 10**9 + shape.linear + 2 * shape.other
    longer = parts(gradient_checkpointing=False)
    assert longer["activations"] > adapted["checkpoints"] + adapted["work"]


# What it costs


def test_costs_are_those_that_were_measured():
    """Each line of the table is a step in the raw files, and none of these is left out."""
    found = set()

    def add(size, adapted, given, trl, trainers, exact=False):
        for kind, rows in trainers.items():
            for shape, row in rows.items():
                if kind != "trl" and shape in trl:
                    rollout, sides = kind.split()[0], tuple(map(int, shape.split("x")))
                    seconds = trl[shape]["step"], trl[shape]["scoring"], row["step"]
                    rounded = tuple(round(value, 2) for value in seconds)
                    found.add(measured.Step(size, adapted, given, rollout, exact, *sides, *rounded))

    for policy, trainers in read("step-7b")["results"]["7b"].items():
        add("7b", "LoRA" in policy, None, trainers["trl"], trainers)
    runs = read("step-7b-trained")["runs"]
    for run in runs:
        given = run["arguments"]
        first = runs[0]["results"]["7b"]["trl"]
        add("7b", True, given["train_precision"], first, run["results"]["7b"], given["exact_rollouts"])
    for run in read("step-7b-trained-weights")["runs"]:
        trainers = run["results"]["7b"]
        add("7b", False, run["arguments"]["train_precision"], trainers["trl"], trainers)
    for size in ("7b", "32b"):
        trainers = read(f"step-{size}-nvfp4")["results"][size]
        add(size, True, "nvfp4", trainers["trl"], trainers)
    assert set(measured.STEPS) == found and len(measured.STEPS) == len(found)


def test_a_cost_is_told_where_it_was_measured_alone(shapes, tmp_path):
    def cost(size: str = "7b", rank: int = 32, **settings) -> str:
        args = QuantGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=True, report_to=[], **settings)
        return measured.cost(args, shapes[size, rank])

    colocated = {"use_vllm": True, "vllm_mode": "colocate", "max_completion_length": 1100}
    told = cost(rollout_precision="fp8", **colocated)
    assert told.startswith("14.51 s a step against TRL's 18.90 s, 1.30x (1.10x") and "of 1024 new tokens" in told
    assert cost(rank=0, rollout_precision="fp8", **colocated).startswith("13.78 s")
    assert cost() == "as TRL's, which this run is"
    assert "embedded" in cost(rollout_precision="fp8")
    unlimited = colocated | {"max_completion_length": None}
    assert cost(rollout_precision="fp8", **unlimited) == "not measured without a `max_completion_length`"
    for other in ({"rollout_precision": "int8"}, {"rollout_precision": "fp8", "vllm_mode": "server"}):
        assert cost(**colocated | other).startswith("not measured")
    assert cost("14b", rollout_precision="fp8", **colocated).startswith("not measured")


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


def test_the_longest_prompt_is_measured_in_tokens():
    tokenizer, data = tiny_tokenizer(), training.dataset(8)
    assert longest_prompt(data, tokenizer) == max(map(len, data["prompt"]))  # a token is a byte
    chat = data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    assert longest_prompt(chat, tokenizer) > longest_prompt(data, tokenizer)


# The commands


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def options(tmp_path) -> list[str]:
    problems = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    settings = f"--dataset_name {path} --reward_funcs arithmetic --output_dir {tmp_path / 'run'} --use_cpu true"
    settings += " --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 8 --report_to none"
    return settings.split()


@pytest.fixture
def unloaded(monkeypatch):
    """No weights are read, and no trainer is built."""

    def refuse(*args, **kwargs):
        raise AssertionError("a plan loads nothing")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    monkeypatch.setattr(QuantGRPOTrainer, "__init__", refuse)


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


def test_a_run_without_a_length_is_planned_all_the_same(model_dir, options, capsys, unloaded):
    at = options.index("--max_completion_length") + 1
    main(["plan", model_dir, *options[:at], "none", *options[at + 1 :], "--rollout_precision", "int4"])
    told = capsys.readouterr().out
    assert re.search(r"with at most \d+ \+ any number of tokens", told)
    assert "Memory: not estimated without a `max_completion_length`" in told
    assert "Cost against BF16: not measured without a `max_completion_length`" in told


def test_no_memory_is_told_of_a_base_in_bitsandbytes(model_dir, options, capsys, unloaded):
    """The model's shape tells the memory of its weights in 16 and 32 bits, and in our own codes."""
    main(["plan", model_dir, *options, "--rollout_precision", "int8", "--use_peft", "--load_in_8bit", "true"])
    told = capsys.readouterr().out
    assert "Memory: not estimated with a base that bitsandbytes holds" in told and "peak" not in told


def test_the_card_is_the_one_that_is_named(model_dir, options, capsys, unloaded):
    main(["plan", model_dir, *options, "--card", "0.5"])
    told = capsys.readouterr().out
    assert "a GPU with 0.5 GB" in told and "does not fit" in told
    main(["plan", model_dir, *options, "--card", "80"])
    assert ": fits" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="`--card`=-1"):
        main(["plan", model_dir, *options, "--card", "-1"])


def test_the_model_may_be_named_as_in_training(model_dir, options, capsys, unloaded, tmp_path):
    """With the very options of a run, on the command line or in its file; or first, beside what the command adds."""
    main(["plan", model_dir, *options])
    planned = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {model_dir}\n")
    for argv in (
        ["--model_name_or_path", model_dir, *options],
        [*options, f"--model_name_or_path={model_dir}"],
        ["--config", str(tmp_path / "run.yaml"), *options],
        ["--card", "80", model_dir, *options],
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="FP8 may run there")
def test_what_this_machine_lacks_ends_a_dry_run_alone(model_dir, options, capsys, unloaded):
    """A plan is for any machine, and says it; a dry run of training ends there with the same words."""
    quantized = ["--rollout_precision", "fp8", "--use_vllm", "true"]
    main(["plan", model_dir, *options, *quantized])
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
