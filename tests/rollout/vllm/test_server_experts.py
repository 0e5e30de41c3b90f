"""
A mixture of experts behind a real vLLM server on this CPU, in BF16: it equals a fresh engine after each sync, and the
self-check, whose tensors the server's worker compares, finds each expert and each router that is not the policy's.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
from accelerate import Accelerator
from int8_experts import int8_experts_on_cpu
from peft import LoraConfig
from servers import SERVER_OF_INT8_EXPERTS, WIDE, behind, serving, trainer_of
from tampering import of_expert, sync_changed
from tiny import MIXTURES, tiny_tokenizer
from training import trainer_for
from vllm_engines import fresh, one_by_one, policy, served, update

from trl_quant.config.checks import vllm as vllm_rules
from trl_quant.models.families import HEAD, ROUTERS
from trl_quant.rollout import VLLMServerEngine
from trl_quant.rollout.engine import RolloutNoise
from trl_quant.rollout.vllm import client, kernel_checks, transfer
from trl_quant.rollout.vllm.same_device import filled
from trl_quant.rollout.vllm.serving import serve_command
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
UNREACHED = 2  # the expert that no token reaches


@pytest.fixture(scope="module", params=[pytest.param(family, marks=pytest.mark.long) for family in MIXTURES])
def server(request, tmp_path_factory):
    """One family's policy and the server that was started on it, shared by the tests of this file."""
    path = tmp_path_factory.mktemp(request.param)
    dtype = torch.float32 if request.param == "mixtral" else torch.bfloat16
    model = policy(path, family=request.param, tied=False, dtype=dtype)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
            bias[UNREACHED] = -10.0  # a token's scores lie between 0 and 1
    model.save_pretrained(path)
    with serving(path) as (url, _):
        yield SimpleNamespace(model=model, url=url)


@pytest.fixture(scope="module")
def sampler(server) -> VLLMServerEngine:
    settings = {"mode": "server", "server_base_url": server.url, "max_completion_length": 8, "sync_check_steps": 0}
    settings["request_timeout"] = 60.0
    for name, param in server.model.named_parameters():  # the drift is measured by what is trained at the start
        param.requires_grad_(name.endswith("layers.0.self_attn.q_proj.weight"))
    built = VLLMServerEngine(server.model, Accelerator(cpu=True), tiny_tokenizer(), precision="bf16", **settings)
    server.model.requires_grad_(True)
    built.sync()
    return built


@pytest.fixture
def tampered(sampler):
    """Syncs the server with changed tensors; it is right again after the test."""
    yield partial(sync_changed, sampler)
    sync_changed(sampler, dict)
    assert sampler.differing_weight() is None


def names_sent(sampler, monkeypatch) -> list[list[str]]:
    """The names of the tensors of each update that reaches the server from now on."""
    sent = []

    def noting(memory, stream):
        tensors = list(stream)
        sent.append([name for name, _ in tensors])
        return filled(memory, tensors)

    monkeypatch.setattr(client, "filled", noting)
    return sent


def test_three_syncs_leave_the_bits_of_a_fresh_engine(sampler, tmp_path, monkeypatch):
    """The first sends all tensors, the second those of attention in one layer, the third one layer's experts too."""
    sent, model, seen = names_sent(sampler, monkeypatch), sampler.model, []
    all_names = [name for name, _ in sampler.stream(measured=False)]
    always = {name for name in all_names if ".layers.0.self_attn." in name}  # by which the drift is measured
    if sampler.weights.model_type == "glm4_moe":  # the group of a router that has a buffer
        always |= {name for name in all_names if ".layers.1.mlp.gate." in name}
    layer = model.model.layers[1]
    changes = (None, layer.self_attn.v_proj.weight, layer.mlp.experts.down_proj)
    expected = [set(all_names)] + [
        always | {name for name in all_names if ".layers.1." in name and part in name}
        for part in (".self_attn.", ".experts.")
    ]
    sampler.is_current = False
    update(model, seed=0)
    for step, changed in enumerate(changes):
        if changed is not None:
            changed.data.mul_(1.25)
        sampler.sync()
        assert set(sent[-1]) == expected[step] and len(sent[-1]) == len(expected[step])
        seen.append(served(sampler.vllm_client))
        assert seen[-1] == one_by_one(fresh(model, "bf16", tmp_path / f"checkpoint-{step}"))
    assert len({str(samples) for samples in seen}) == len(sent) == 3
    token, metrics = sampler.vllm_client.token, sampler.check_sync()
    assert metrics["sync_check/logp_difference"] < metrics["sync_check/bound"]
    # The workers compared all weights with theirs, loaded none, and know whose they are
    assert sampler.vllm_client.token == token and served(sampler.vllm_client) == seen[-1]


def test_nothing_is_sent_where_nothing_has_changed(sampler, monkeypatch):
    monkeypatch.setattr(sampler, "changed_groups", lambda policy: set())
    sent, before = names_sent(sampler, monkeypatch), served(sampler.vllm_client)
    sampler.sync()
    assert not sent and served(sampler.vllm_client) == before


def test_a_change_that_is_not_sent_is_found(sampler, tampered, monkeypatch):
    sampler.model.model.layers[1].mlp.experts.down_proj.data[UNREACHED, 0, 0] += 0.5
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "changed_groups", lambda policy: {"model.layers.1.self_attn"})
        sampler.sync()
    assert sampler.differing_weight() == f"model.layers.1.mlp.experts.down_proj[{UNREACHED}]"


def fault_of(sampler) -> str:
    with pytest.raises(RuntimeError) as error:
        sampler.check_sync()
    return str(error.value)


def test_an_expert_that_is_zeroed_is_found(sampler, tampered):
    tampered(lambda tensors: tensors | {name: tensors[name] * 0 for name in of_expert(tensors, UNREACHED)})
    assert sampler.differing_weight() == f"model.layers.1.mlp.experts.gate_up_proj[{UNREACHED}]"
    fault = fault_of(sampler)
    if sampler.weights.model_type == "glm4_moe":  # the text says nothing
        assert f"corrupted: the engine holds another `model.layers.1.mlp.experts.gate_up_proj[{UNREACHED}]`" in fault


def test_two_experts_that_are_exchanged_are_found(sampler, tampered):
    def exchange(tensors):
        first, second = (of_expert(tensors, expert) for expert in (UNREACHED, 3))
        return tensors | {a: tensors[b] for pair in zip(first, second, strict=True) for a, b in (pair, pair[::-1])}

    tampered(exchange)
    assert sampler.differing_weight() == f"model.layers.1.mlp.experts.gate_up_proj[{UNREACHED}]"


def test_one_stale_matrix_of_an_expert_is_found(sampler, tampered):
    before = {name: tensor.clone() for name, tensor in sampler.stream(measured=False)}
    update(sampler.model, seed=7, size=1e-3)  # less than the text check sees in one expert
    stale = of_expert(before, 3)[-1]
    tampered(lambda tensors: tensors | {stale: before[stale]})
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.down_proj[3]"
    assert "another `model.layers.1.mlp.experts.down_proj[3]`" in fault_of(sampler)


@pytest.mark.parametrize("gate", ["gate", "shared_expert_gate", "e_score_correction_bias"])
def test_a_router_of_other_bits_is_found(sampler, tampered, gate):
    names = [name for name in dict(sampler.stream(measured=False)) if name.removesuffix(".weight").endswith(f".{gate}")]
    if not names:
        pytest.skip(f"{sampler.weights.model_type} has no {gate}")

    def quantized(tensors):
        return tensors | {names[-1]: tensors[names[-1]].to(torch.float8_e4m3fn).to(tensors[names[-1]])}

    tampered(quantized)
    assert gate in sampler.differing_weight()


def test_other_weights_are_compared_too(sampler, tampered):
    """As in an engine in this process: a norm and the embeddings, of which one value is off by a bit."""
    for name in ("model.norm.weight", "model.embed_tokens.weight"):

        def changed(tensors, name=name):
            tensor = tensors[name].clone()
            tensor.view(-1)[5:6].view(torch.int16).add_(1)
            return tensors | {name: tensor}

        tampered(changed)
        assert sampler.differing_weight() == name


def test_noise_is_taken_back_before_a_part_is_sent(sampler):
    sampler.lay_noise(RolloutNoise(sigma=0.5, seed=1, step=1))
    sampler.model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.25)
    sampler.sync()
    assert sampler.differing_weight() is None and sampler.noise_metrics()["noise/sigma"] == 0


def test_a_sync_that_was_compared_leaves_no_token(monkeypatch):
    """Another run's, that came after this one had asked for a comparison."""
    worker = SimpleNamespace(weight_transfer_engine=SimpleNamespace(comparison=object()))
    monkeypatch.setattr(transfer.SyncToken, "held", "before")
    transfer.WorkerExtension.set_sync_token(worker, "other")
    assert transfer.SyncToken.held is None
    worker.weight_transfer_engine.comparison = None
    transfer.WorkerExtension.set_sync_token(worker, "own")
    assert transfer.SyncToken.held == "own"


def test_a_run_that_connects_ends_the_comparison_of_a_killed_one():
    """Its first sync is loaded. The other run, should it live, is told so."""

    class Connected:
        def init_transfer_engine(self, init_info):
            self.given = init_info

    class Transfer(transfer.ReloadBracket, Connected):
        pass

    worker = SimpleNamespace(weight_transfer_engine=Transfer())
    worker.weight_transfer_engine.comparison = object()
    worker.weight_transfer_engine.init_transfer_engine("address")
    assert worker.weight_transfer_engine.comparison is None and worker.weight_transfer_engine.given == "address"
    with pytest.raises(RuntimeError, match="another run connected to this server"):
        transfer.WorkerExtension.differing_weight(worker)


def test_grpo_trains_a_mixture(tmp_path, server):
    if server.model.config.model_type != "qwen2_moe":
        pytest.skip("shown for one family")
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    settings = behind(server.url, "bf16") | {"sync_check_steps": 1, "max_steps": 2, "peft_config": adapter}
    trainer = trainer_for(tmp_path / "out", str(server.model.name_or_path), **settings)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "sync_check/logp_difference" in log]
    assert len(logged) == 2
    assert all(log["sync_check/logp_difference"] < log["sync_check/bound"] for log in logged)
    trainer.vllm_generation.sync_weights()
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert served(trainer.vllm_generation.vllm_client) == one_by_one(fresh(model, "bf16", tmp_path / "trained"))


def test_what_a_server_must_not_do(sampler):
    """Named in one message, with the command that starts the right one."""
    info = sampler.vllm_client.get_server_info()
    assert sampler.unfit_options(info, sampler.model.config) == []
    info["parallel_config"]["enable_expert_parallel"] = True
    (fault,) = sampler.unfit_options(info, sampler.model.config)
    assert fault.startswith("`--enable-expert-parallel`, with which vLLM crashes on a CPU")
    info["parallel_config"] |= {"enable_expert_parallel": False, "data_parallel_size": 2}
    (fault,) = sampler.unfit_options(info, sampler.model.config)
    assert fault.startswith("`--data-parallel-size 2`, of whose engines only the first one's answers arrive")
    info["parallel_config"]["data_parallel_size"] = 1
    info["model_config"]["quantization"] = "fp8_per_channel"  # of routers too
    (fault,) = sampler.unfit_options(info, sampler.model.config)
    assert fault == "the precision 'fp8_per_channel', and `rollout_precision`='bf16'"
    command = serve_command("model", "fp8", has_experts=True)
    assert "--model model --format fp8 --output model-fp8" in command and " model-fp8 --dtype" in command
    assert command.count(" --moe-backend triton") == 1
    assert "--moe" not in serve_command("model", "fp8") + serve_command("model", "fp8_block", has_experts=True)
    assert "--quantization" not in command and "--quantization fp8_per_channel" in serve_command("model", "fp8")
    assert "prepare" not in serve_command("model", "bf16", has_experts=True)


def test_codes_of_experts_travel_to_a_server(tmp_path, monkeypatch):
    """Three steps with noise and a check before each, in INT8: the server equals an engine on the trained weights."""
    int8_experts_on_cpu(monkeypatch)
    policy(model := tmp_path / "model", family="qwen3_moe", tied=False)
    prepared = quantize_checkpoint(model, tmp_path / "prepared", "int8", [*HEAD, ROUTERS])
    noise = {"noise_schedule": "exponential", "noise_sigma_start": 0.05, "noise_sigma_end": 0.01, "noise_stages": 3}
    options = {"sync_check_steps": 1, "max_steps": 3, "learning_rate": 1e-3, **noise}
    with serving(prepared, *WIDE[:2], script=SERVER_OF_INT8_EXPERTS) as (url, _):
        monkeypatch.setattr(vllm_rules, "check_experts_here", lambda precision: None)
        trainer = trainer_of(tmp_path, url, model, "int8", **options)
        first = fresh(trainer.model, "int8", tmp_path / "first")
        (products,) = first.apply_model(kernel_checks.int8_errors)
        trainer.vllm_generation.engine.product_errors = products  # of this CPU; a server cannot be asked for them
        before = one_by_one(first)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert [log["noise/sigma"] for log in logs] == [0, 0.05, 0.01]
        assert all(0 < log["sync_check/logp_difference"] < log["sync_check/bound"] for log in logs)
        trainer.check_sync()
        last = one_by_one(fresh(trainer.model, "int8", tmp_path / "last"))
        assert served(trainer.vllm_generation.vllm_client) == last != before
