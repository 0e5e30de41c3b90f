"""An adapter beside the base in vLLM's layers: against vLLM's own adapters, merged weights, and the policy itself."""

import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import warm
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from places import ROOT


pytest.importorskip("vllm", reason="vLLM is not installed")
from torch import nn
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_engines import SMALL, engine, fp8_block_anywhere, fresh, greedy, keep, policy, score, update

from trl_quant.rollout.vllm import worker
from trl_quant.rollout.vllm.adapter import hold_adapter, linear_layers, write_adapter


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
pytestmark = pytest.mark.vllm


def adapted(path, family: str = "qwen3", tied: bool = True, layers: int = 2, **settings):
    """A tiny policy with an adapter that acts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = policy(path, family=family, tied=tied, num_hidden_layers=layers)
        return get_peft_model(model, LoraConfig(**LORA | settings))


def set_b(model, factor: float) -> None:
    """Multiplies all Bs."""
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data *= factor


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left - right).abs().mean().item()


def held(sampler) -> dict[str, tuple[int, ...]]:
    """Shape of A by the name of vLLM's layer."""

    def shapes(model):
        return {name: tuple(m.lora_a.shape) for name, m in linear_layers(model).items() if hasattr(m, "lora_a")}

    return sampler.llm.apply_model(shapes)[0]


# Against vLLM's own adapters


def test_it_equals_vllms_adapter_from_files(tmp_path):
    """Within a tolerance that the previous sync's adapter exceeds tenfold."""
    model = policy(tmp_path / "policy", with_lora=True)
    sampler = engine(model, "bf16", lora_sync="adapter")
    assert sampler.llm.llm_engine.vllm_config.lora_config is None
    scores = []
    for step in range(3):
        update(model, seed=step)
        sampler.sync()
        model.save_pretrained(tmp_path / f"adapter-{step}")
        options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": LINEARS}
        base = fresh(model.get_base_model(), "bf16", tmp_path / "base", **options)
        ours = score(sampler.llm)
        theirs = score(base, lora_request=LoRARequest("policy", 1, str(tmp_path / f"adapter-{step}")))
        error = distance(ours, theirs)
        assert error < 0.03
        assert all(distance(ours, before) > 10 * max(error, 0.03) for before in [*scores, score(base)])
        scores.append(ours)


# Against itself, bit for bit


# The embeddings are read by no code of a precision
@pytest.mark.parametrize(("precision", "tied"), rest_is_long([("int8", False), ("bf16", True), ("fp8_block", True)]))
def test_pushes_leave_nothing_behind(tmp_path, precision, tied, monkeypatch):
    """Two adapters, the first again, none: as fresh engines, and as an engine that knows of no adapter."""
    if precision == "fp8_block":
        fp8_block_anywhere(monkeypatch)
    model = adapted(tmp_path / "policy", tied=tied)
    sampler = engine(model, precision, lora_sync="adapter")
    seen = []
    for seed in (0, 1):
        update(model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        started = engine(model, precision, lora_sync="adapter")
        started.sync()
        assert seen[-1] == greedy(started.llm)
        if seed == 0:
            first = {name: param.clone() for name, param in model.named_parameters() if "lora_" in name}
    model.load_state_dict(first, strict=False)
    sampler.sync()
    assert greedy(sampler.llm) == seen[0] != seen[1]

    base = greedy(fresh(model.get_base_model(), precision, tmp_path / "base"))
    assert base not in seen
    set_b(model, 0)
    sampler.sync()
    assert greedy(sampler.llm) == base


def test_before_the_first_push_it_is_the_base(tmp_path):
    model = adapted(tmp_path / "policy")
    sampler = engine(model, "int8", lora_sync="adapter")
    assert greedy(sampler.llm) == greedy(fresh(model.get_base_model(), "int8", tmp_path / "base"))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_reload_of_the_base_leaves_it(tmp_path, precision):
    """As if both were new: nothing looks for the adapter in the stream, and none of it is lost."""
    model = adapted(tmp_path / "policy")
    sampler = engine(model, precision, lora_sync="adapter")
    sampler.sync()
    before = greedy(sampler.llm)
    for change, same in ((0.5, False), (2.0, True)):
        model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight.data *= change
        with model.disable_adapter():
            sampler.weights.merged = lambda layer: dict(layer.get_base_layer().named_parameters())
            sampler.llm.collective_rpc(worker.reload, kwargs={"stream": sampler.stream()})
        sampler.llm.reset_prefix_cache()
        assert (greedy(sampler.llm) == before) == same


# Against merged weights and the policy


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"down_proj": 8, "k_proj": 2}, "alpha_pattern": {"o_proj": 24}},
        {"use_rslora": True, "r": 8},
        {"target_modules": ["q_proj", "down_proj"]},
        pytest.param({"target_modules": ["v_proj", "up_proj"], "layers_to_transform": [1]}, marks=pytest.mark.long),
        pytest.param({"r": 1, "lora_alpha": 4}, marks=pytest.mark.long),
    ],
    ids=["patterns", "rslora", "few", "one layer", "rank 1"],
)
def test_ranks_scales_and_targets(tmp_path, settings):
    """As the merged policy, which half of the adapter is far from."""
    model = adapted(tmp_path / "policy", **settings)
    sampler = engine(model, "bf16", lora_sync="adapter")
    sampler.sync()
    merged = score(fresh(model, "bf16", tmp_path / "merged"))
    ours = score(sampler.llm)
    set_b(model, 0.5)
    sampler.sync()
    error, other = distance(ours, merged), distance(score(sampler.llm), merged)
    print(f"error {error:.4f}, of half the adapter {other:.4f}")
    assert error < 0.04 < 0.2 < other


def test_layers_without_an_adapter_stay_as_they_are(tmp_path):
    settings = {"target_modules": ["k_proj", "q_proj", "down_proj"], "rank_pattern": {"k_proj": 8}}
    sampler = engine(adapted(tmp_path / "policy", **settings, layers_to_transform=[1]), "bf16", lora_sync="adapter")
    name = "model.layers.1."
    assert held(sampler) == {f"{name}self_attn.qkv_proj": (12, 128), f"{name}mlp.down_proj": (4, 256)}

    def changed(model):
        return {name for name, layer in linear_layers(model).items() if "apply" in vars(layer.quant_method)}

    assert sampler.llm.apply_model(changed)[0] == held(sampler).keys()


@pytest.mark.parametrize("family", rest_is_long(["qwen2", "llama", "mistral", "phi3", "gemma2", "gemma3"]))
def test_families(tmp_path, family):
    """The self-check finds the engine near the policy, and far from the policy of half the adapter."""
    model = adapted(tmp_path / "policy", family)
    sampler = engine(model, "bf16", lora_sync="adapter", sync_check_steps=1)
    sampler.sync()
    found = sampler.check_sync()
    set_b(model, 0.5)
    sampler.pushed = sampler.weights.adapter()  # its bookkeeping would notice too
    sampler.mark_current()
    with pytest.raises(RuntimeError, match="stale: the engine computes the same as before") as error:
        sampler.check_sync()
    difference = float(str(error.value).partition("differ from the policy's by ")[2].split()[0])
    assert difference > 5 * found["sync_check/logp_difference"]


# Tensor parallelism: vLLM's layers as each rank has them

WIDTH, HEADS, KV_HEADS, HEAD, INNER = 24, 8, 2, 4, 48


class Block(nn.Module):
    """The linear layers of a decoder on one rank, with bases of zeros."""

    def __init__(self, fused_in_policy: bool):
        super().__init__()
        options = {"bias": False, "params_dtype": torch.float32}
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv_proj = QKVParallelLinear(WIDTH, HEAD, HEADS, KV_HEADS, **options)
        self.mlp.gate_up_proj = MergedColumnParallelLinear(WIDTH, [INNER, INNER], **options)
        self.mlp.down_proj = RowParallelLinear(INNER, WIDTH, **options)
        self.layers = (self.attn.qkv_proj, self.mlp.gate_up_proj, self.mlp.down_proj)
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        self.packed_modules_mapping = {name: [name] for name in parts} if fused_in_policy else parts
        for layer in self.layers:
            layer.weight.data.zero_()
            layer.quant_method.process_weights_after_loading(layer)


def on_ranks(monkeypatch, size: int, *args) -> list[Block]:
    blocks = []
    place = "vllm.model_executor.layers.linear.get_tensor_model_parallel_"
    monkeypatch.setattr(f"{place}world_size", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(f"{place}rank", lambda rank=rank: rank)
        blocks.append(Block(*args))
    return blocks


def rows_of(rank: int, size: int) -> dict[str, list[int]]:
    """Rows of the whole matrices that a rank has: its share of q's heads, and the heads of k and v that they attend."""
    mine = [head for head in range(HEADS) if head * size // HEADS == rank]
    attended = sorted({head * KV_HEADS // HEADS for head in mine})
    q, kv = ([head * HEAD + i for head in heads for i in range(HEAD)] for heads in (mine, attended))
    inner = [i for i in range(INNER) if i * size // INNER == rank]
    return {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": inner, "up_proj": inner}


@pytest.mark.parametrize("fused_in_policy", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_rank_holds_its_part(monkeypatch, size, fused_in_policy):
    """Against the whole BA of each matrix; 2 heads of keys and values for up to 8 ranks."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD}
    sizes |= {"gate_proj": INNER, "up_proj": INNER, "down_proj": WIDTH}
    outputs, groups = sizes, {name: [name] for name in sizes}
    if fused_in_policy:
        groups = {"qkv_proj": LINEARS[:3], "gate_up_proj": LINEARS[4:6], "down_proj": ["down_proj"]}
        outputs = {name: sum(sizes[part] for part in parts) for name, parts in groups.items()}
    tensors, ranks, whole = {}, {}, {}
    for rank, (leaf, out) in enumerate(outputs.items(), start=1):
        name = f"attn.{leaf}" if leaf[0] in "qkv" else f"mlp.{leaf}"
        a = torch.randn(rank, INNER if leaf == "down_proj" else WIDTH, generator=generator)
        b = torch.randn(out, rank, generator=generator)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        ranks[name] = rank
        whole |= dict(zip(groups[leaf], (b @ a).split([sizes[part] for part in groups[leaf]]), strict=True))

    x, inner = torch.randn(5, WIDTH, generator=generator), torch.randn(5, INNER, generator=generator)
    down = torch.zeros(5, WIDTH)
    for index, block in enumerate(on_ranks(monkeypatch, size, fused_in_policy)):
        hold_adapter(block, ranks, torch.float32, "cpu")
        write_adapter(block, tensors)
        qkv, gate_up, row = block.layers
        rows = rows_of(index, size)
        for layer, parts in ((qkv, LINEARS[:3]), (gate_up, LINEARS[4:6])):
            expected = torch.cat([x @ whole[part][rows[part]].T for part in parts], dim=1)
            torch.testing.assert_close(layer.quant_method.apply(layer, x), expected)
        down += row.quant_method.apply(row, inner[:, rows["gate_proj"]])
    torch.testing.assert_close(down, inner @ whole["down_proj"].T)


def test_an_adapter_of_other_shape_is_refused(monkeypatch):
    (block,) = on_ranks(monkeypatch, 1, False)
    hold_adapter(block, {"attn.q_proj": 2, "mlp.down_proj": 1}, torch.float32, "cpu")

    def tensors(**ranks):
        shapes = {"q_proj": ("attn.q_proj", WIDTH, HEADS * HEAD), "down_proj": ("mlp.down_proj", INNER, WIDTH)}
        shapes["up_proj"] = ("mlp.up_proj", WIDTH, INNER)
        found = {}
        for leaf, rank in ranks.items():
            name, inputs, outputs = shapes[leaf]
            found[f"base_model.model.{name}.lora_A.weight"] = torch.ones(rank, inputs)
            found[f"base_model.model.{name}.lora_B.weight"] = torch.ones(outputs, rank)
        return found

    write_adapter(block, tensors(q_proj=2, down_proj=1))
    for ranks in ({"q_proj": 1, "down_proj": 1}, {"q_proj": 2}, {"q_proj": 2, "down_proj": 1, "up_proj": 1}):
        with pytest.raises(RuntimeError, match="other layers or ranks"):
            write_adapter(block, tensors(**ranks))
    with pytest.raises(ValueError, match=r"`lora_sync`='adapter'.*Block calls no linear layers.*attn.z_proj.*merge"):
        hold_adapter(block, {"attn.q_proj": 2, "attn.z_proj": 2}, torch.float32, "cpu")


# How the engine starts


@pytest.mark.parametrize("wide_norms", [False, True])
def test_dummy_weights(tmp_path, wide_norms):
    """What the user loads with is loaded with, and the engine holds an adapter and wide norms all the same."""
    model = adapted(tmp_path / "policy")
    options = {"engine_kwargs": SMALL | {"load_format": "dummy"}, "wide_norms": wide_norms}
    sampler = engine(model, "bf16", lora_sync="adapter", **options)
    (types,) = sampler.llm.apply_model(
        lambda m: {m.model.norm.weight.dtype, m.model.layers[0].input_layernorm.weight.dtype}
    )
    assert (torch.float32 in types) == wide_norms
    base = greedy(sampler.llm)
    assert base != greedy(fresh(model.get_base_model(), "bf16", tmp_path / "base"))
    set_b(model, 1000)  # dummy weights are small, and what they multiply smaller
    sampler.sync()
    assert greedy(sampler.llm) != base
    set_b(model, 0)
    sampler.sync()
    assert greedy(sampler.llm) == base


def test_compiled_models_are_told_apart(tmp_path):
    """vLLM finds them by this hash; one without the adapter, or with another's shapes, would be taken for this one."""
    models = [adapted(tmp_path / "policy", r=r) for r in (4, 4, 8)]
    samplers = [engine(model, "bf16", lora_sync="adapter") for model in models]
    samplers += [engine(models[0], "bf16", wide_norms=wide) for wide in (False, True)]
    hashes = [sampler.llm.llm_engine.vllm_config.compute_hash() for sampler in samplers]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, ["use_dora", "merge"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "merge"]),
        ({"bias": "all"}, ["bias", "merge"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["lm_head", "merge"]),
        ({"target_modules": ["q_proj", "embed_tokens"]}, ["embed_tokens", "merge"]),
        ({"alora_invocation_tokens": [1]}, ["ALora", "merge"]),
    ],
)
def test_adapters_that_the_engine_cannot_hold(tmp_path, change, words):
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"]} | change
    task = {"task_type": "CAUSAL_LM"} if "alora_invocation_tokens" in change else {}
    model = get_peft_model(policy(tmp_path / "policy", tied=False), LoraConfig(**settings, **task))
    with pytest.raises(ValueError) as refusal:
        engine(model, "bf16", lora_sync="adapter")
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_settings_of_vllms_own_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`vllm_engine_kwargs` has \['max_lora_rank'\]"):
        engine(adapted(tmp_path / "policy"), "bf16", lora_sync="adapter", engine_kwargs=SMALL | {"max_lora_rank": 64})


# In processes of their own


def on_two_ranks(path: Path) -> list[torch.Tensor]:
    """The scores that [`main`] leaves."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    for name in ("MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    environment["VLLM_CACHE_ROOT"] = str(path / "cache")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = warm.run([sys.executable, *launcher, __file__, str(path)], env=environment, capture_output=True)
    files = [path / f"scores-{rank}.pt" for rank in range(2)]
    assert done.returncode == 0 and all(file.exists() for file in files), (done.stdout + done.stderr)[-3000:]
    scores = [torch.load(file) for file in files]
    assert all(map(torch.equal, *scores))
    return scores[0]


def main(path: Path) -> None:
    """Scores of two adapters in a row, on one of two ranks."""
    model, scores = adapted(path / f"policy-{os.environ['RANK']}", layers=1), []
    sampler = engine(model, "bf16", lora_sync="adapter", tensor_parallel_size=2)
    keep(sampler)
    for seed in (0, 1):
        update(model, seed=seed)
        sampler.sync()
        sampler.check_sync()
        scores.append(score(sampler.llm))
    torch.save(scores, path / f"scores-{os.environ['RANK']}.pt")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.long
def test_two_ranks_sample_as_one_process(tmp_path):
    found = on_two_ranks(tmp_path)
    model = adapted(tmp_path / "policy", layers=1)
    sampler = engine(model, "bf16", lora_sync="adapter")
    expected = []
    for seed in (0, 1):
        update(model, seed=seed)
        sampler.sync()
        expected.append(score(sampler.llm))
    for (i, ours), (j, theirs) in product(enumerate(found), enumerate(expected)):
        assert distance(ours, theirs) < 0.03 if i == j else distance(ours, theirs) > 0.3


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(Path(sys.argv[1]))
