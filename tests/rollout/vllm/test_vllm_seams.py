"""What of vLLM the package builds on: if one of these tests fails, vLLM has changed there; `rollout/vllm/` must follow.

Most of it is internal to vLLM. It is named here, and checked without an engine where that is possible; one test looks
into an engine that vLLM itself has built.
"""

import ast
import configparser
import importlib.util
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import PROMPTS, fresh, greedy, policy
from vllm_names import CALLS, KERNELS, LINEAR, NAMES, NAMES_OF_TRUNCATION, PATHS, has, resolve, short

from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.vllm.support import vllm_version


pytestmark = pytest.mark.vllm


def imported_names() -> Iterator[tuple[str, str, str]]:
    """`(file, module, name)` of all that ours and the tests import from vLLM."""
    for folder in ("trl_quant", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] == "vllm":
                    for alias in node.names:
                        yield path.relative_to(ROOT).as_posix(), node.module, alias.name


def test_versions():
    """The extras pin the versions in which all of this was checked."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    pins = [Requirement(extras[name].strip().splitlines()[0]).specifier for name in ("vllm", "cpu")]
    assert pins[0] == pins[1] and Version(resolve("vllm:__version__")).base_version in pins[0]


@pytest.mark.parametrize("path", NAMES, ids=short)
def test_names(path):
    owner = resolve(path)
    missing = [name for name in NAMES[path].split() if not has(owner, name)]
    assert not missing, f"vLLM's {path} has no {', '.join(missing)}"


def test_the_name_that_keeps_a_layers_input_unquantized():
    if vllm_version() < Version("0.31"):
        pytest.skip("vLLM 0.27 has no such name, and was tested without it")
    assert has(resolve(f"{LINEAR}:LinearBase"), "requires_unquantized_input")


@pytest.mark.parametrize("path", NAMES_OF_TRUNCATION, ids=short)
def test_names_of_truncation(path):
    if not has(resolve("vllm:EngineArgs"), "return_sampling_mask"):
        pytest.skip("this version does not return what truncation left")
    missing = [name for name in NAMES_OF_TRUNCATION[path].split() if not has(resolve(path), name)]
    assert not missing, f"vLLM's {path} has no {', '.join(missing)}"


@pytest.mark.parametrize("path", CALLS, ids=short)
def test_calls(path):
    function = resolve(path)
    parameters = inspect.signature(function).parameters
    owner = resolve(path.rpartition(".")[0]) if "." in path.partition(":")[2] else None
    bound = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, path.rpartition(".")[2]))
    positional, _, keywords = CALLS[path].partition("*")
    positional = [*(["self"] if bound else []), *positional.split()]
    assert list(parameters)[: len(positional)] == positional
    inspect.signature(function).bind(*positional, **dict.fromkeys(keywords.split()))  # TypeError if that is no call


def test_the_lists_are_complete():
    """All that is imported from vLLM, and all classes by which linear layers are recognized, are in the lists."""
    named = {(path, name) for path, names in NAMES.items() for name in names.split()}
    named |= {(path, name) for path, names in NAMES_OF_TRUNCATION.items() for name in names.split()}
    for path in [*NAMES, *CALLS]:
        module, _, attributes = path.partition(":")
        named.add((module, attributes.partition(".")[0]))
    imported = list(imported_names())
    assert len({file for file, _, _ in imported if file.startswith("trl_quant/rollout/vllm/")}) > 2
    assert not [entry for entry in imported if entry[1:] not in named]
    methods = {method for entry in PRECISIONS.values() if entry.vllm for method in entry.vllm.methods}
    assert len(methods) > 6 and methods <= {name for _, name in named}


def test_made_up_names_are_missed():
    """The tests above can fail."""
    assert has(resolve(f"{LINEAR}:LinearBase"), "prefix") and not has(resolve(f"{LINEAR}:LinearBase"), "prefixes")
    assert not has(resolve(f"{LINEAR}:QKVParallelLinear"), "num_kv_head_replica")
    assert has(resolve("vllm"), "_custom_ops") and not has(resolve("vllm"), "_custom_op")
    with pytest.raises(TypeError):
        inspect.signature(resolve("vllm:LLM.wake_up")).bind("self", tag=["weights"])


def test_names_of_quantizations():
    known = resolve("vllm.model_executor.layers.quantization:QUANTIZATION_METHODS")
    online = {entry.vllm.online for entry in PRECISIONS.values() if entry.vllm and entry.vllm.online}
    assert len(online) > 2 and online | {"compressed-tensors"} <= set(known)


def test_names_of_kernels():
    """Kernels are told apart by how their names begin."""
    kernels = [name for path, names in NAMES.items() if path.startswith(KERNELS) for name in names.split()]
    entries = [precision.vllm for precision in PRECISIONS.values() if precision.vllm]
    beginnings = {name for entry in entries for name in entry.kernels + entry.wrong_kernels}
    assert beginnings and all(any(kernel.startswith(b) for kernel in kernels) for b in beginnings)


def test_environment_variables():
    """Those that ours and the tests set are vLLM's."""
    known, found = resolve("vllm.envs:environment_variables"), set()
    for folder in ("trl_quant", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(__file__):
                found |= set(re.findall(r"""["' ](VLLM_[A-Z0-9_]+)(?:["']|=1 )""", path.read_text()))
    assert {"VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"} <= found <= set(known), found - set(known)


def test_flags_of_the_server():
    from trl_quant.rollout.vllm.serving import serve_command

    command = serve_command("model", "fp8", "http://127.0.0.1:8001", True, has_experts=True).splitlines()[-1]
    flags = {flag.replace("-", "_") for flag in re.findall(r" --([a-z-]+)", command)}
    assert {"host", "port", "trust_remote_code", "moe_backend"} <= flags
    assert flags - {"host", "port"} <= resolve("vllm:EngineArgs").__dataclass_fields__.keys()


def test_endpoints_of_the_server():
    """The development endpoints that ours asks for, and the names by which a server knows requests."""
    from trl_quant.rollout.vllm.client import ENDPOINTS

    places = ("serve.dev.rlhf", "rl.online")  # below vLLM 0.32, and from then on
    is_old = importlib.util.find_spec("vllm.entrypoints.serve.dev.rlhf") is not None
    router = resolve(f"vllm.entrypoints.{places[0] if is_old else places[1]}.api_router:router")
    assert {"/pause", "/resume", "/abort_requests"} <= {route.path for route in router.routes}
    for module, beginning in zip(("openai.completion", "scale_out.token_in_token_out"), ENDPOINTS, strict=True):
        source = inspect.getsource(resolve(f"vllm.entrypoints.{module}.serving"))
        assert f'f"{beginning}-{{self._base_request_id(raw_request' in source
    assert "X-Request-Id" in inspect.getsource(resolve("vllm.entrypoints.serve.engine.serving"))


def test_facts():
    sampling = resolve("vllm:SamplingParams")
    assert sampling(prompt_logprobs=0).skip_reading_prefix_cache and not sampling().skip_reading_prefix_cache
    assert "Qwen3ForCausalLM" in resolve("vllm:ModelRegistry").get_supported_archs()
    assert resolve("vllm.platforms:current_platform").is_cpu() != torch.cuda.is_available()
    mapper = resolve("vllm.model_executor.models.utils:WeightsMapper")
    assert hasattr(mapper, "get_rename_mapper") or hasattr(mapper, "get_unstacked_mapper")


def test_a_live_engine(tmp_path):
    """In this process: where things stand, and what of them works as we use it."""
    trained = policy(tmp_path / "policy")
    llm = fresh(trained, "bf16", tmp_path / "fresh")
    (worker,), (model,) = llm.collective_rpc(lambda worker: worker), llm.apply_model(lambda model: model)
    missing = []
    for owner, name in ((llm, "llm"), (worker, "worker"), (model, "model")):
        for path in PATHS[name].split():
            try:
                attrgetter(path)(owner)
            except AttributeError as error:
                missing.append(f"{name}.{path}: {error}")
    assert not missing, missing
    assert worker.get_model() is model  # functions get the objects themselves, and nothing is pickled on the way

    # Linear layers
    layers = {m.prefix: m for m in model.modules() if isinstance(m, resolve(f"{LINEAR}:LinearBase"))}
    assert layers["model.layers.1.mlp.down_proj"].input_size == 256
    assert {type(layer.quant_method).__name__ for layer in layers.values()} == {"UnquantizedLinearMethod"}

    # The prefix cache holds whole blocks of the prompts until it is reset.
    expected = greedy(llm)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) > 0
    assert llm.reset_prefix_cache() and len(pool.cached_block_hash_to_block) == 0

    # Log-probabilities come by position and token, and none for the first token of a prompt.
    scoring = resolve("vllm:SamplingParams")(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[2]}], scoring, use_tqdm=False)
    first, *others = output.prompt_logprobs
    assert first is None and all(step[t].logprob < 0 for step, t in zip(others, PROMPTS[2][1:], strict=True))

    # A reload streams through `load_weights` of the model, also through one that is set on the object; it returns what
    # it filled.
    from trl_quant.rollout.tensors import default_dtype

    streamed, filled, load_weights = [], set(), model.load_weights

    def recorded(weights):
        names = load_weights(streamed.append(name) or (name, tensor) for name, tensor in weights)
        filled.update(names)
        return names

    def reload(worker, stream):
        model.load_weights = recorded
        with default_dtype(worker.vllm_config.model_config.dtype):
            worker.reload_weights(weights_iterator=stream)
        del model.load_weights

    params = dict(trained.named_parameters())
    zeros = ((name, p.detach() * (0 if name.endswith("up_proj.weight") else 1)) for name, p in params.items())
    for stream, same in ((zeros, False), (((name, p.detach()) for name, p in params.items()), True)):
        llm.collective_rpc(reload, kwargs={"stream": stream})
        llm.reset_prefix_cache()
        assert streamed == list(params) and (greedy(llm) == expected) == same
        assert {"model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight"} <= filled
        streamed.clear()
        filled.clear()
        llm.reset_prefix_cache()


def test_experts_in_a_live_engine(tmp_path):
    """Where vLLM holds experts, and the kernel that packs them on a CPU."""
    llm = fresh(policy(tmp_path / "policy", family="qwen3_moe"), "bf16", tmp_path / "fresh")
    (model,) = llm.apply_model(lambda model: model)
    layer = model.get_submodule("model.layers.1.mlp.experts.routed_experts")
    assert layer.w13_weight.shape == (4, 256, 128) and layer.w2_weight.shape == (4, 128, 128)
    assert layer.quant_method.unquantized_backend.name == ("TRITON" if torch.cuda.is_available() else "CPU")
    assert layer.quant_method.moe.intermediate_size_per_partition == 128
    experts = layer.quant_method.moe_kernel.fused_experts
    assert callable(experts.process_weights_after_loading)
    assert torch.cuda.is_available() or experts.isa in ("vec", "amx")
    gate = model.get_submodule("model.layers.1.mlp.gate")
    assert isinstance(gate, resolve(f"{LINEAR}:LinearBase")) and gate.params_dtype == torch.bfloat16


def test_the_type_of_tempered_logits():
    """`exact_rollouts` scores them as the second model runner does: in 16 bits in 0.26, in FP32 in later versions."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from trl_quant.rollout.vllm import exact

    sampler = MagicMock(needs_logits_processing=np.ones(1, bool), logits_processors=[])
    rest = list(inspect.signature(Sampler.apply_sampling_params).parameters)[2:]
    given = dict.fromkeys(rest, MagicMock()) | {"idx_mapping_np": np.zeros(1, int), "skip_top_k_top_p": True}
    logits = torch.zeros(1, 8, dtype=torch.bfloat16)
    processed = Sampler.apply_sampling_params(sampler, logits, **given)
    assert processed.dtype == (torch.bfloat16 if exact.DIVIDES_IN_16_BITS else torch.float32)
    sampler.sampling_states.apply_temperature.assert_called_once()
