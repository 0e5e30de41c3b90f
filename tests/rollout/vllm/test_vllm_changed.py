"""
A sync after the first sends only what has changed, and leaves the bits of an engine that starts on the weights: through
vLLM's reload of some layers, and in place. Tests change weights that no sync expects to change, and leave out changes.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cutlass_on_cpu import cutlass_on_cpu
from int8_experts import int8_experts_on_cpu
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import engine, fresh, greedy, policy, update

from trl_quant.models.linears import sent_with
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.vllm import repairs, worker
from trl_quant.rollout.vllm.base import VLLMBase
from trl_quant.run_spec import DISCARDS


pytestmark = pytest.mark.vllm
ATTENTION = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
ATTENDS = {f"model.layers.{index}.self_attn" for index in range(2)}


def adapted(path, family: str, tied: bool = False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(policy(path, family=family, tied=tied), ATTENTION)


@contextmanager
def sending(sampler, monkeypatch) -> Iterator[set[str]]:
    """Collects the groups of the tensors that reach vLLM."""
    sent, stream = set(), sampler.policy_stream

    def noted(*args):
        for name, tensor in stream(*args):
            sent.add(sent_with(name))
            yield name, tensor

    with monkeypatch.context() as patched:
        patched.setattr(sampler, "policy_stream", noted)
        yield sent


def held(sampler) -> dict[str, torch.Tensor]:
    (found,) = sampler.llm.apply_model(lambda m: {n: p.detach().clone() for n, p in m.named_parameters()})
    return found


def change(model, path: str) -> None:
    """As user code may, in a way that PyTorch does not note."""
    param = next(param for name, param in model.named_parameters() if name.endswith(path))
    param.data.view(-1)[: param.numel() // 2] *= 1.5


# What is frozen and changes all the same, and its group
FROZEN = {
    "layers.1.mlp.experts.down_proj": "model.layers.1.mlp.experts",
    "layers.0.mlp.gate.weight": "model.layers.0.mlp",
    "layers.1.post_attention_layernorm.weight": "model.layers.1",
    "layers.0.mlp.down_proj.weight": "model.layers.0.mlp",
    "embed_tokens.weight": "model",
}


@pytest.mark.parametrize(
    ("precision", "family", "tied", "frozen"),
    [
        ("bf16", "qwen3_moe", False, "layers.1.mlp.experts.down_proj"),
        pytest.param("bf16", "mixtral", False, "layers.0.mlp.gate.weight", marks=pytest.mark.long),
        pytest.param("bf16", "glm4_moe", False, "layers.0.mlp.down_proj.weight", marks=pytest.mark.long),
        ("int8", "qwen2", True, "embed_tokens.weight"),
        ("int8", "qwen3", False, "layers.1.post_attention_layernorm.weight"),
    ],
)
def test_layers_that_are_reloaded(tmp_path, monkeypatch, precision, family, tied, frozen):
    """The second sync sends the adapted layers alone, the third also a frozen weight that somebody has changed."""
    model = adapted(tmp_path / "model", family, tied)
    sampler = engine(model, precision)
    groups = {sent_with(name) for name in sampler.weights.parameters()}
    routers = {group for group in groups if family == "glm4_moe" and group.endswith("layers.1.mlp")}  # with buffers
    expected, seen = [groups, ATTENDS | routers, ATTENDS | routers | {FROZEN[frozen]}], []
    for step in range(3):
        update(model, seed=step)
        if step == 2:
            change(model, frozen)
        with sending(sampler, monkeypatch) as sent:
            sampler.sync()
        assert sent == expected[step]
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, precision, tmp_path / f"step-{step}"))
        assert sampler.differing_weight() is None
    assert seen[0] != seen[1] != seen[2] and groups > ATTENDS


def test_a_change_that_is_not_sent_is_found(tmp_path, monkeypatch):
    """So the tests above and below would find it, and so does the self-check."""
    model = adapted(tmp_path / "model", "qwen3_moe")
    sampler = engine(model, "bf16")
    sampler.sync()
    for frozen in ("layers.1.mlp.experts.down_proj", "layers.1.input_layernorm.weight"):
        change(model, frozen)
        update(model, seed=0)
        with monkeypatch.context() as patched:
            patched.setattr(sampler, "changed_groups", lambda policy: ATTENDS)
            sampler.sync()
        assert frozen in sampler.differing_weight()
        assert greedy(sampler.llm) != greedy(fresh(model, "bf16", tmp_path / frozen))
        sampler.is_current = False
        sampler.sync()
        assert sampler.differing_weight() is None


def test_a_routers_buffers_are_always_sent(tmp_path):
    """A fingerprint does not show that they have changed."""
    model = adapted(tmp_path / "model", "glm4_moe")
    sampler = engine(model, "bf16")
    sampler.sync()
    (bias,) = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.copy_(torch.tensor([0.3, -0.2, 9.0, 0.1]))
    sampler.sync()
    assert sampler.differing_weight() is None
    assert greedy(sampler.llm) == greedy(fresh(model, "bf16", tmp_path / "checkpoint"))


@pytest.mark.parametrize("precision", rest_is_long(["int8", "bf16"]))
def test_a_head_alone_and_nothing_at_all(tmp_path, monkeypatch, precision):
    """After a check that fails, all is sent although nothing has changed."""
    model = policy(tmp_path / "model", family="qwen3", tied=False).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    sampler = engine(model, precision)
    sampler.sync()
    seen = [greedy(sampler.llm)]
    for step in range(3):
        if step:
            update(model, seed=step)
        with sending(sampler, monkeypatch) as sent:
            sampler.sync()
        assert sent == ({""} if step else set())
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, precision, tmp_path / f"step-{step}"))
    assert seen[0] == seen[1] != seen[2] != seen[3]
    sampler.llm.apply_model(lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(2))
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()
    with sending(sampler, monkeypatch) as sent:
        sampler.sync()
    assert sent == {sent_with(name) for name in sampler.weights.parameters()}
    assert greedy(sampler.llm) == seen[-1]


@pytest.mark.parametrize("wide", [False, True])
def test_noise_comes_off_before_norms_that_are_not_sent(tmp_path, monkeypatch, wide):
    model = adapted(tmp_path / "model", "qwen3")
    sampler = engine(model, "int8", wide_norms=wide)
    sampler.sync()
    clean = sampler.read_norms()
    sampler.lay_noise(RolloutNoise(0.05, 3, 7))
    noised = greedy(sampler.llm)
    update(model, seed=0)
    with sending(sampler, monkeypatch) as sent:
        sampler.sync()
    assert sent == ATTENDS and sampler.effective_sigma == 0
    now = sampler.read_norms()
    assert all(torch.equal(now[name], clean[name]) for name in clean)
    found = greedy(sampler.llm)
    if wide:  # a fresh engine has narrow norms
        sampler.is_current = False
        sampler.sync()
    assert noised != found == greedy(sampler.llm if wide else fresh(model, "int8", tmp_path / "checkpoint"))
    sampler.lay_noise(RolloutNoise(0.05, 3, 8))
    assert sampler.effective_sigma == pytest.approx(0.05, rel=0.2)


def test_vllms_warnings_of_layers_that_are_left_out_are_not_shown(tmp_path, monkeypatch):
    model = adapted(tmp_path / "model", "qwen3")
    sampler = engine(model, "bf16")
    sampler.sync()
    shown = []
    monkeypatch.setattr(worker.RELOAD, "handle", shown.append)
    worker.RELOAD.setLevel(logging.WARNING)
    update(model, seed=0)
    sampler.sync()
    assert not shown and worker.RELOAD.level == logging.WARNING
    monkeypatch.setattr(worker.RELOAD, "setLevel", lambda level: None)
    update(model, seed=0)
    sampler.sync()
    assert len(shown) > 8 and all("Failed to load weights" in record.msg for record in shown)


# In place, with vLLM's CUTLASS layers


@pytest.fixture
def sampler(tmp_path, monkeypatch):
    """A mixture in INT8, with its linear layers and experts held as on a GPU."""
    cutlass_on_cpu(monkeypatch)
    int8_experts_on_cpu(monkeypatch)
    monkeypatch.setattr(VLLMBase, "on_cpu", False)
    built = engine(adapted(tmp_path / "model", "qwen3_moe"), "int8")
    built.sync()
    assert built.destinations["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 256, 128)
    return built


def rewritten(sampler) -> dict[str, torch.Tensor]:
    """vLLM's parameters after a sync of all tensors into zeros."""
    sampler.llm.apply_model(lambda model: [param.data.zero_() for param in model.parameters() if param.numel() > 1])
    sampler.is_current = False
    sampler.sync()
    return held(sampler)


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_what_is_written_in_place(sampler, monkeypatch):
    """After each change as after a sync of all tensors, and without a reload."""
    monkeypatch.setattr(worker, "reload", None)
    before, model = held(sampler), sampler.model
    for frozen in (None, *list(FROZEN)[:3], "embed_tokens.weight"):
        update(model, seed=0)
        if frozen is not None:
            change(model, frozen)
        sampler.lay_noise(RolloutNoise(0.05, 3, 7))
        with sending(sampler, monkeypatch) as sent:
            sampler.sync()
        assert sent == ATTENDS | ({FROZEN[frozen]} if frozen else set())
        now = held(sampler)
        assert any(not torch.equal(now[name], before[name]) for name in now)
        assert_same(now, rewritten(sampler))
        assert sampler.differing_weight() is None
        before = now


def test_all_experts_are_written_whole(sampler, monkeypatch, tmp_path):
    """Full training changes everything: two tensors of codes and two of scales for the experts of a layer."""
    monkeypatch.setattr(worker, "reload", None)
    written, stream = [], sampler.stream

    def noted(*args, **kwargs):
        for name, tensor in stream(*args, **kwargs):
            written.append(name)
            yield name, tensor

    monkeypatch.setattr(sampler, "stream", noted)
    for param in sampler.model.parameters():
        param.requires_grad_(True)
    update(sampler.model, seed=5)
    sampler.sync()
    assert len([name for name in written if ".experts." in name]) == 8
    assert sorted(written) == sorted(sampler.destinations)
    assert_same(held(sampler), rewritten(sampler))
    assert sampler.differing_weight() is None


@pytest.mark.parametrize("level", [1, DISCARDS])
def test_after_a_sleep_that_discards_weights_all_are_sent(sampler, monkeypatch, level):
    def sleep(level):
        if level == DISCARDS:
            sampler.llm.apply_model(lambda model: [param.data.zero_() for param in model.parameters()])

    monkeypatch.setattr(sampler, "sleep_level", level)
    monkeypatch.setattr(sampler, "discarded", sampler.llm.apply_model(repairs.constants)[0])
    monkeypatch.setattr(sampler.llm, "sleep", sleep)
    monkeypatch.setattr(sampler.llm, "wake_up", lambda tags: None)
    expected = held(sampler)
    with sending(sampler, monkeypatch) as sent:
        sampler.rest()
        sampler.ensure_ready()
    groups = {sent_with(name) for name in sampler.weights.parameters()}
    assert sent == (groups if level == DISCARDS else set())
    assert_same(held(sampler), expected)
    update(sampler.model, seed=1)
    with sending(sampler, monkeypatch) as sent:
        sampler.sync()
    assert sent == ATTENDS
    assert_same(held(sampler), rewritten(sampler))
