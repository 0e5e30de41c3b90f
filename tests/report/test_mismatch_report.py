"""`trl-quant report --mismatch`: where activations part is found where it was planted, and nowhere else."""

import errno
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from drawing import generated
from matplotlib import image
from peft import PeftModel, get_peft_model
from tiny import MIXTURES, save_tiny, tiny_tokenizer
from training import lora
from transformers import AutoModelForCausalLM, TrainingArguments

from trl_quant.cli import main
from trl_quant.cli.report import mismatch_parser
from trl_quant.corrections.diagnostics import POSITIONS
from trl_quant.layers import EngineWeight
from trl_quant.report.mismatch import OTHERWISE, MismatchOptions, about_operators, chart, described, measure
from trl_quant.report.run_settings import take
from trl_quant.report.trained import Trained, build_engine
from trl_quant.rollout import SharedEngine, TransformersEngine
from trl_quant.rollout.verify.activations import Comparison
from trl_quant.runs.checkpoints import write_rollout_state


pytestmark = pytest.mark.isa

PROMPTS = [[72, 101, 108], [50, 43, 50, 61, 32, 7], [9]]
TOKENS = [(7 * i + 3) % 250 for i in range(40)]


@pytest.fixture(autouse=True)
def fresh_accelerator(tmp_path):
    """A process has one mixed precision; what a trainer's arguments do lets the next test have another."""
    TrainingArguments(str(tmp_path / "unused"), use_cpu=True, bf16=False).device  # noqa: B018


def loaded(path, family: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **kwargs):
    """A tiny model as a trainer has it: its rotary embedding stays in FP32."""
    return AutoModelForCausalLM.from_pretrained(save_tiny(path / "tiny", family, **kwargs), dtype=dtype)


def engine(policy, precision: str = "bf16", **kwargs) -> TransformersEngine:
    built = TransformersEngine(policy, Accelerator(cpu=True), tiny_tokenizer(), precision=precision, **kwargs)
    built.sync()
    return built


def compared(sampler, tokens=TOKENS) -> Comparison:
    comparison = Comparison(sampler)
    comparison.add(tokens)
    return comparison


def points(comparison: Comparison) -> dict:
    found = {point.name: point for point in comparison.points.values()}
    assert len(found) == len(comparison.points)
    return found


def differing(found: dict) -> list[str]:
    """Where something is added."""
    return [name for name, point in found.items() if point.added.same < 1 or point.added.error > 0]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
def test_equal_models_have_the_same_bits(tmp_path, family, with_lora):
    """A merged adapter is a sum that is rounded once more, which only the layers that have one may show."""
    policy = loaded(tmp_path, family)
    same = compared(engine(get_peft_model(policy, lora()) if with_lora else policy))
    assert not same.missing
    for point in same.points.values():
        exact = not with_lora or not point.name.endswith("_proj")
        assert (point.added.same == 1) == (point.added.error == 0) == exact, point.name
        assert (point.total.same == 1) == (point.total.error == 0)
        assert point.total.same == 1 or with_lora
        assert point.total.error < 0.05


def test_the_points_are_those_of_the_forward(tmp_path):
    """In the order in which they run, each with all its elements."""
    widths = {"input_layernorm": 128, "self_attn.q_proj": 128, "self_attn.k_proj": 64, "self_attn.v_proj": 64}
    widths |= {"self_attn.o_proj.input": 128, "self_attn.o_proj": 128}
    widths |= {"post_attention_layernorm.input": 128, "post_attention_layernorm": 128}
    widths |= {"mlp.gate_proj": 256, "mlp.up_proj": 256, "mlp.down_proj.input": 256, "mlp.down_proj": 128}
    layers = [(i, {f"layers.{i}.{name}": n for name, n in widths.items()} | {f"layers.{i}": 128}) for i in range(2)]
    expected = [(None, {"embed_tokens": 128}), *layers, (None, {"norm": 128, "logits": 320})]
    found = compared(engine(loaded(tmp_path, "llama"))).points.values()
    seen = [(p.layer, p.name, p.total.count, p.added.count) for p in found]
    assert seen == [(i, name, n := 40 * width, n) for i, part in expected for name, width in part.items()]


def scale(module, factor: float) -> None:
    """Multiplies what a layer of the embedded engine or a norm computes."""
    if hasattr(module, "load"):
        module.weight = EngineWeight(module.weight.values * factor, module.weight.scale)
    else:
        module.weight.data *= factor


@pytest.mark.parametrize(
    "place",
    ["layers.0.input_layernorm", "layers.0.self_attn.v_proj", "layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"],
)
def test_a_fault_is_found_in_its_operator(tmp_path, place):
    """Before it all bits are the same; after it the error is inherited, and nothing is added."""
    sampler = engine(loaded(tmp_path))
    scale(sampler.copy.get_submodule(f"model.{place}"), 1.0625)  # in BF16 products come out scaled, but for roundings
    found = points(compared(sampler))
    names = list(found)
    for name in names[: names.index(place)]:
        assert found[name].total.same == found[name].added.same == 1
    assert found[place].added.error == pytest.approx(0.0625, rel=0.05)
    assert found[place].total.error == found[place].added.error
    for name in names[names.index(place) + 1 :]:
        assert found[name].added.same == 1 and found[name].added.error == 0
    assert found[names[-1]].total.error > 0 and found[names[-1]].total.same < 1
    layer, kind = place.split(".")[1], place.rpartition(".")[2]
    assert about_operators(described(compared(sampler))) == [
        f"The first operator that differs is {place}; until then all bits are the same.",
        f"100% of what operators add (squares of relative errors) enters in layer {layer}; "
        f"of all of it 100% in {kind}.",
    ]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_fault_in_an_expert_is_found(tmp_path, family):
    policy = loaded(tmp_path, family)
    policy.set_experts_implementation("eager")
    for name, param in policy.named_parameters():
        if name.endswith("_proj.bias"):
            param.data.zero_()  # engines round before they add it
    sampler = engine(policy)
    assert not differing(points(compared(sampler))) and not compared(sampler).missing
    scale(sampler.copy.get_submodule("model.layers.1.mlp.experts.down_proj"), 1.0625)
    found = points(compared(sampler))
    assert "layers.1.mlp.gate" in found and differing(found) == ["layers.1.mlp.experts"]
    assert found["layers.1.mlp.experts"].added.error == pytest.approx(0.0625, rel=0.05)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_fault_between_operators(tmp_path, layer):
    sampler = engine(loaded(tmp_path))
    sampler.copy.model.layers[layer].register_forward_hook(lambda module, args, output: output * 1.0625)
    found = points(compared(sampler))
    assert differing(found) == [f"layers.{layer}"]
    assert found[f"layers.{layer}"].added.error == pytest.approx(0.0625, rel=0.05)

    sampler = engine(loaded(tmp_path))
    rotary = sampler.copy.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()  # acts in attention alone
    assert differing(points(compared(sampler))) == [f"layers.{i}.self_attn.o_proj.input" for i in range(2)]


def test_errors_are_of_all_sequences(tmp_path):
    """Relative in the norm over all elements: not the mean over sequences."""
    sampler = engine(loaded(tmp_path), "int4")
    parts = [TOKENS, [5, 6, 7]]
    both = Comparison(sampler)
    for tokens in parts:
        both.add(tokens)
    alone = [compared(sampler, tokens) for tokens in parts]
    for name, point in both.points.items():
        squares, norms = (sum(getattr(one.points[name].total, x) for one in alone) for x in ("square", "reference"))
        assert point.total.error == pytest.approx((squares / norms) ** 0.5, rel=1e-9)
        assert point.total.count == sum(one.points[name].total.count for one in alone)
    error = both.points["logits"].total.error
    mean = sum(one.points["logits"].total.error for one in alone) / 2
    assert error > 0.01 and abs(error / mean - 1) > 1e-3


def test_the_mismatch_of_tokens(tmp_path):
    """KL and its buckets from log-probabilities that are computed here, one sequence at a time."""
    policy = loaded(tmp_path, dtype=torch.float32, eos_token_id=319)
    sampler = engine(policy, "int4", max_completion_length=40, temperature=1.5)
    torch.manual_seed(3)
    result = measure(sampler, PROMPTS, 1.5)
    torch.manual_seed(3)
    _, completions, logprobs, _ = generated(sampler, PROMPTS)
    k1, k3 = [], defaultdict(list)
    for prompt, completion, sampled in zip(PROMPTS, completions, logprobs, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logps = (policy(ids).logits[0, len(prompt) - 1 : -1].double() / 1.5).log_softmax(-1)
        for t, (token, (own,)) in enumerate(zip(completion, sampled, strict=True)):
            log_w = logps[t, token].item() - own
            k1.append(-log_w)
            k3[sum(t >= start for start in POSITIONS)].append(torch.tensor(log_w).expm1().item() - log_w)
    every = [x for bucket in k3.values() for x in bucket]
    found = result["sampled"]
    assert found["tokens"] == len(every) == sum(map(len, completions)) > 60
    assert found["mismatch/kl_k3"] == pytest.approx(sum(every) / len(every), rel=1e-3)
    assert found["mismatch/kl_k1"] == pytest.approx(sum(k1) / len(k1), rel=1e-3)
    buckets = [value for name, value in found.items() if "by_position" in name]
    assert buckets == pytest.approx([sum(k3[i]) / len(k3[i]) for i in sorted(k3)], rel=1e-3) and len(buckets) == 2
    assert buckets[0] != pytest.approx(buckets[1], rel=0.05)
    assert found["same_tokens"] < 0.1
    # The embedded engine decodes in FP32 as it computes in one pass
    assert result["one_pass"]["mismatch/kl_k3"] == pytest.approx(found["mismatch/kl_k3"], rel=1e-3)


# Of a run and its settings


def settings(model: str, *options: str) -> MismatchOptions:
    args = MismatchOptions(**vars(mismatch_parser().parse_args(["--mismatch", model, "--dtype", "bfloat16", *options])))
    take(args, Trained.find(model).settings, OTHERWISE)
    return args


def built(model: str, *options: str) -> TransformersEngine:
    return build_engine(settings(model, *options), Trained.find(model), tiny_tokenizer(), 8, 8, {})


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """Of two checkpoints with adapters, of which the second was not written to its end."""
    path = tmp_path_factory.mktemp("run")
    base = AutoModelForCausalLM.from_pretrained(save_tiny(path / "base", dtype=torch.bfloat16))
    for step in (1, 2):
        torch.manual_seed(step)
        get_peft_model(base, lora()).save_pretrained(path / "out" / f"checkpoint-{step}")
        recorded = {"rollout_precision": "nvfp4", "train_precision": "nvfp4", "lora_sync": "merge"}
        write_rollout_state(path / "out" / f"checkpoint-{step}", {"settings": recorded})
        base = AutoModelForCausalLM.from_pretrained(path / "base")
    (path / "out" / "checkpoint-1" / "trainer_state.json").write_text('{"log_history": []}')
    return str(path / "out")


def test_a_run_is_its_newest_whole_checkpoint(run):
    trained = Trained.find(run)
    assert trained.path.endswith("checkpoint-1") and trained.base.endswith("base")
    plain = AutoModelForCausalLM.from_pretrained(trained.base)
    without = plain(torch.tensor([TOKENS])).logits
    expected = PeftModel.from_pretrained(plain, trained.path)(torch.tensor([TOKENS])).logits
    policy = trained.policy("bf16", torch.bfloat16, merged=False)
    assert torch.equal(policy(torch.tensor([TOKENS])).logits, expected) and not torch.equal(expected, without)


@pytest.mark.parametrize(
    ("train", "sampled"), [("nvfp4", "nvfp4"), ("int8", "int8"), ("bf16", "nvfp4"), ("int8", "bf16")]
)
def test_pairs_of_precisions(run, train, sampled):
    """One base for both, or the same products: the same bits. Any other pair differs from the first layer on."""
    sampler = built(run, "--train_precision", train, "--rollout_precision", sampled)
    assert isinstance(sampler, SharedEngine) == (train == sampled)
    found = points(compared(sampler))
    same = {name for name, point in found.items() if point.total.same == 1}
    assert (same == set(found)) == (train == sampled)
    assert {"embed_tokens", "layers.0.input_layernorm"} <= same
    assert ("layers.0.self_attn.q_proj" in same) == (train == sampled)


def test_the_runs_settings_are_the_defaults(run, tmp_path, capsys):
    """To the numbers, and with other ones to others; the chart is drawn."""
    argv = ["report", "--mismatch", run, "--num_completions", "3", "--max_completion_length", "20"]
    main([*argv, "--dtype", "bfloat16", "--output", str(tmp_path / "new/own.json")])
    own = json.loads((tmp_path / "new/own.json").read_text())
    assert own["arguments"]["rollout_precision"] == own["arguments"]["train_precision"] == "nvfp4"
    assert own["one_pass"]["same_tokens"] == 1 and all(point["same"] == 1 for point in own["points"])
    assert "No operator differs" in capsys.readouterr().out.replace("\n", " ")

    main([*argv, "--dtype", "bfloat16", "--train_precision", "bf16", "--output", str(tmp_path / "other.json")])
    other = json.loads((tmp_path / "other.json").read_text())
    assert other["arguments"]["rollout_precision"] == "nvfp4" and other["one_pass"]["mismatch/kl_k3"] > 1e-4
    printed = " ".join(capsys.readouterr().out.split())
    assert "first operator that differs is layers.0.self_attn.q_proj; until then" in printed
    assert f"KL {other['sampled']['mismatch/kl_k3']:.2e} nats" in printed
    for layer in other["layers"]:
        assert layer["layer"] in printed and f"{layer['added']:.1e}" in printed
    rows = {layer["layer"]: layer for layer in other["layers"]}
    assert list(rows) == ["embedding", "layers.0", "layers.1", "head"]
    assert rows["layers.1"]["inherited"] == rows["layers.0"]["error"] > rows["layers.0"]["inherited"] == 0
    added = [p["added"] for p in other["points"] if p["layer"] == 1]
    assert rows["layers.1"]["worst_added"] == max(added)
    assert rows["layers.1"]["added"] == pytest.approx(sum(x**2 for x in added) ** 0.5)
    depth, position = chart(other).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in depth.lines}
    assert lines["error of the output"] == [layer["error"] for layer in other["layers"]]
    assert lines["added by its operators"] == [layer["added"] for layer in other["layers"]]
    heights = [other["sampled"][f"mismatch/by_position/{name}"] for name in ("0-15", "16-63")]
    assert [bar.get_height() for bar in position.patches] == heights


def test_a_model_in_mixed_precision(tmp_path):
    """The default types; a model of its own; prompts from a file, as conversations; a chart."""
    model = save_tiny(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "What is 7 times 6?"}\n')
    options = ["--rollout_precision", "int8", "--prompts", str(tmp_path / "prompts.jsonl"), "--num_completions", "3"]
    main(
        ["report", f"--mismatch={model}", *options, "--max_completion_length", "8", "--output", str(tmp_path / "c.png")]
    )
    assert image.imread(tmp_path / "c.png").std() > 0.01


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--mismatch", "{tmp}/empty"], "`--mismatch`='{tmp}/empty' holds no model and no adapter"),
        (["--mismatch", "{tmp}/nowhere"], "`--mismatch`='{tmp}/nowhere' is neither a directory here"),
        (["--mismatch", "{tmp}/quantized"], "is quantized already"),
        (["--mismatch", "{tmp}/model", "--max_completion_length", "0"], "`--max_completion_length`=0 is out of range"),
        (["--mismatch", "{tmp}/model", "--num_completions", "0"], "`--num_completions`=0 is out of range"),
        (["--mismatch", "{tmp}/model", "--temperature", "0"], "`--temperature`=0 is out of range"),
        (["--mismatch", "{tmp}/model", "--vllm_gpu_memory_utilization", "2"], "utilization`=2 is out of range"),
        (["--mismatch", "{tmp}/model", "--train_precision", "nf4"], "`--train_precision`='nf4' is bitsandbytes'"),
        (
            ["--mismatch", "{tmp}/model", "--vllm_engine_kwargs", "[1]"],
            "`--vllm_engine_kwargs`='[1]' is not a JSON object",
        ),
        (["--mismatch", "{tmp}/model", "--vllm_engine_kwargs", '{"seed": 1}'], "acts only with `--engine vllm`"),
        (["--mismatch", "{tmp}/model", "--engine", "vllm", "--rollout_precision", "int4"], "does not run in vLLM"),
        (["--mismatch", "{tmp}/model", "--prompts", "{tmp}/nowhere.jsonl"], "there is no such file"),
        (["--mismatch", "{tmp}/model", "--prompts", "{tmp}/texts.jsonl"], "has no prompts"),
        (["--mismatch", "{tmp}/model", "--output", "{tmp}/report.txt"], "report.txt': charts are written as"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(options, says, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    save_tiny(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "quantized").mkdir()
    quantized = config | {"quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(quantized))
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1="}\n')

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    with pytest.raises(SystemExit) as error:
        main(["report", *[part.replace("{tmp}", str(tmp_path)) for part in options]])
    assert str(error.value.code).startswith("error: ") and says.replace("{tmp}", str(tmp_path)) in error.value.code


@pytest.mark.parametrize("name", ["mismatch.json", "mismatch.png"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, name):
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    target = tmp_path / "results" / name

    def full(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    options = ["--num_completions", "1", "--max_completion_length", "2", "--dtype", "bfloat16"]
    with pytest.raises(SystemExit) as error:
        main(["report", "--mismatch", model, *options, "--output", str(target)])
    assert error.value.code == f"error: [Errno {errno.ENOSPC}] No space left on device: {str(target)!r}"
    assert list(target.parent.iterdir()) == []


def test_a_precision_must_be_known(capsys):
    for option in ("--rollout_precision", "--train_precision", "--dtype", "--engine"):
        with pytest.raises(SystemExit) as error:
            main(["report", "--mismatch", "m", option, "int5"])
        assert error.value.code == 2 and "invalid choice: 'int5'" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_vllm(tmp_path, family):
    """All points are found in vLLM's fused layers, and a layer of the policy that it does not have is told apart."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, policy
    from vllm_engines import engine as vllm_engine

    model = policy(tmp_path / "policy", family=family)
    eager = {name: value for name, value in SMALL.items() if name != "compilation_config"} | {"enforce_eager": True}
    sampler = vllm_engine(model, "bf16", engine_kwargs=eager)
    sampler.sync()
    same = compared(sampler)
    assert not same.missing and len(same.points) > 2 * 13
    assert same.points["model.embed_tokens"].total.same == 1
    assert max(point.total.error for point in same.points.values()) < 0.03
    clean = {name: point.added.error for name, point in points(same).items()}
    assert max(clean.values()) < 0.01

    for leaf in ("k_proj", "up_proj", "down_proj", "post_attention_layernorm"):
        (module,) = [module for name, module in model.model.layers[1].named_modules() if name.endswith(leaf)]
        module.weight.data *= 2
        found = points(compared(sampler))
        module.weight.data /= 2
        (place,) = [name for name in found if name.startswith("layers.1") and name.endswith(leaf)]
        assert found[place].added.error == pytest.approx(0.5, rel=0.05)
        assert all(point.added.error <= clean[name] + 0.003 for name, point in found.items() if name != place)
        assert all(
            found[name].total.error == clean_point.total.error
            for name, clean_point in points(same).items()
            if list(found).index(name) < list(found).index(place)
        )
