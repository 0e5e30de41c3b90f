"""What `trl-quant choose` measures: an engine with the run's own arguments, weights and way of syncing."""

import base64
import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from accelerate import Accelerator
from long_tests import rest_is_long
from peft import get_peft_model
from places import ROOT
from readers import load_reader, save_reader
from safetensors.torch import load_file
from tiny import save_tiny, tiny_tokenizer
from training import config, lora, make
from transformers import AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
import vllm
from vllm import LLM
from vllm_engines import COLOCATED, GPU, SMALL, keep

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, choose_precision
from trl_quant.rollout.settings import SamplingSettings
from trl_quant.rollout.vllm import choice, trial
from trl_quant.storage.experts import NamesOnDisk
from trl_quant.storage.source import skeleton


pytestmark = pytest.mark.vllm

COLOCATE = {
    **COLOCATED,
    "vllm_gpu_memory_utilization": 0.2,
    "sync_check_steps": 0,  # which samples too
}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}
RUNS = {  # name -> (arguments of the run, of its trainer)
    "full": (SAMPLING, {}),
    "noise": ({"noise_schedule": "linear", "generation_kwargs": {"frequency_penalty": 0.1, "min_tokens": 2}}, {}),
    "merge": ({"vllm_gpu_memory_utilization": 0.25}, {"peft_config": lora}),
    "adapter": ({"lora_sync": "adapter", "generation_kwargs": {"stop": ["<"]}}, {"peft_config": lora}),
}
OWN = {"max_tokens", "min_tokens", "ignore_eos"}  # what a trial samples in its own way


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


class Recorder:
    """What vLLM is asked for."""

    def __init__(self, monkeypatch):
        self.engines, self.samplings = [], []
        generate = LLM.generate

        def build(**arguments):
            self.engines.append(arguments)
            return LLM(**arguments)

        def sample(llm, prompts, sampling_params, **kwargs):
            self.samplings.append(sampling_params)
            return generate(llm, prompts, sampling_params, **kwargs)

        monkeypatch.setattr(vllm, "LLM", build)
        monkeypatch.setattr(LLM, "generate", sample)

    def take(self) -> tuple[dict, list[dict]]:
        """The engine that was built since the last call, and how it sampled."""
        (engine,) = self.engines
        names = [name for name in self.samplings[0].__struct_fields__ if not name.startswith("_")]
        samplings = [{name: getattr(sampling, name) for name in names} for sampling in self.samplings]
        self.engines, self.samplings = [], []
        return engine, samplings


def streamed(engine) -> list[tuple]:
    """Names, shapes and types of what a sync sends."""
    if engine.lora_sync == "adapter":
        return [(name, tensor.shape, tensor.dtype) for name, tensor in engine.weights.adapter().items()]
    return [(name, tensor.shape, tensor.dtype) for name, tensor in engine.stream()]


@pytest.mark.parametrize("name", rest_is_long(RUNS, "adapter"))
def test_the_engine_on_trial_is_the_runs(name, model, tmp_path, monkeypatch):
    """vLLM is asked for one engine by both, with what they sample and sync alike."""
    recorder, trials = Recorder(monkeypatch), []

    def remember(asked, precision):
        trials.append(asked)
        return trial.Speed(1.0, 1.0) if precision == "int8" else "not now"

    monkeypatch.setattr(choice, "measure", remember)
    options, others = RUNS[name]
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="bf16", **COLOCATE | options)
    given = {key: value() for key, value in others.items()}
    assert choose_precision(QuantGRPOTrainer, model, args, **given).precision == "int8"
    assert not recorder.engines
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", **COLOCATE | options)
    trainer = make(QuantGRPOTrainer, args, model, **{key: value() for key, value in others.items()})
    run = trainer.vllm_generation.engine
    keep(run)
    trainer.vllm_generation.generate([[5, 6, 7]] * 8, None, 4)
    engine, (sampling,) = recorder.take()

    tried = trial.build(trials[0], "int8")
    keep(tried)
    speed = trial.try_out(tried, trials[0])
    assert 0 < speed.step < 10 and 0 < speed.sync < 10
    engine_tried, samplings_tried = recorder.take()

    assert engine_tried == engine and engine["max_num_batched_tokens"] == 4096 and engine["max_num_seqs"] == 8
    assert sampling.pop("stop_token_ids") == [tiny_tokenizer().eos_token_id]
    for sampling_tried in samplings_tried:
        assert sampling_tried.pop("stop_token_ids") == []  # a trial ends at no token
        assert {n for n in sampling if sampling[n] != sampling_tried[n]} <= OWN and sampling_tried["ignore_eos"]
    assert {s["max_tokens"] for s in samplings_tried} == {1, trial.NEW_TOKENS}
    assert streamed(tried) == streamed(run)

    # The runs differ, so that equal is not empty.
    assert engine["gpu_memory_utilization"] == (0.25 if name == "merge" else 0.2)
    held = engine["model_loader_extra_config"]
    assert bool(held.get("adapter")) == bool(tried.pushed) == (name == "adapter")
    assert held.get("wide_norms", False) == tried.wide_norms == (name == "noise")
    assert (sampling["temperature"] == 0.7) == (name == "full") and (sampling["frequency_penalty"] > 0) == (
        name == "noise"
    )
    assert sampling["detokenize"] == (name == "adapter")  # text is needed to stop at "<", and for nothing else


def test_speed_is_of_one_token_and_one_sync(monkeypatch):
    """By a made-up clock: prompts, which both generations read, count in neither, nor do first times."""
    clock, firsts = [0.0], {"sync": 7.0, "generate": 5.0}
    prompts = []

    def sync():
        clock[0] += 2.0 + firsts.pop("sync", 0.0)

    def draw(requests):
        prompts.append([request.prompt for request in requests])
        clock[0] += 0.5 + 0.25 * engine.settings.max_completion_length + firsts.pop("generate", 0.0)

    engine = SimpleNamespace(
        sync=sync,
        draw=draw,
        settings=SamplingSettings(),
        limits=lambda: (16, 2048),
        accelerator=SimpleNamespace(process_index=0),
    )
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])
    settings = {"max_num_seqs": 4, "max_completion_length": 1064}
    speed = trial.try_out(engine, trial.Trial("", torch.float32, torch.float32, {}, None, True, settings))
    assert speed == trial.Speed(step=0.25, sync=2.0)
    assert speed.rate(batch=4, length=1064) == pytest.approx(4 * 1064 / (2 + 1064 * 0.25))
    middle = trial.PROMPT_TOKENS + (1064 - trial.NEW_TOKENS) // 2
    assert {len(ids) for mine in prompts for ids in mine} == {middle} and {len(mine) for mine in prompts} == {4}


def test_a_large_policy_takes_little_memory(model):
    """Weights of one shape and type share their memory; all else is as in the run."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for adapted in (False, True):
        run = get_peft_model(policy, lora()) if adapted else policy
        like = trial.policy_like(trial.Trial.of(run, Accelerator(cpu=not GPU), {}))
        assert {param.device.type for param in like.parameters()} == {"meta"}
        trial.fill(like, torch.device("cpu"))
        mine, theirs = (
            {name: (p.shape, p.dtype, p.requires_grad) for name, p in m.named_parameters()} for m in (like, run)
        )
        assert mine == theirs and len({dtype for _, dtype, _ in mine.values()}) == 1 + adapted
        places = {param.data_ptr() for param in like.parameters()}
        assert len(places) == len({(shape, dtype) for shape, dtype, _ in mine.values()}) < len(mine) / 2


def test_what_sees_images_is_named_as_published(tmp_path):
    """In another process, too. A model that was built from its config alone gives Gemma 3's tower other names."""
    policy, _ = load_reader(save_reader(tmp_path, "gemma3"))
    run = pickle.loads(pickle.dumps(trial.Trial.of(get_peft_model(policy, lora()), Accelerator(cpu=not GPU), {})))
    saved = load_file(tmp_path / "model.safetensors").keys()

    def on_disk(model) -> set[str]:
        names = NamesOnDisk(model)
        return {names.of(name) for name, _ in model.named_parameters()}

    assert on_disk(trial.policy_like(replace(run, adapters={}))) == saved != on_disk(skeleton(policy.config, False))


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_of_their_own(model, tmp_path, monkeypatch):
    """They find a speed, or say in one line why there is none, and leave no files; `test_choose` has it for one."""
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    monkeypatch.chdir(tmp_path)
    ended = []

    def run(*args, **kwargs):
        ended.append(warm.run(*args, **kwargs))
        return ended[-1]

    monkeypatch.setattr(trial, "subprocess", SimpleNamespace(run=run))
    warm.ensure_running()
    monkeypatch.setattr("tempfile.tempdir", short := tempfile.mkdtemp())  # sockets have short names
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # each rank would compile for as long as all else takes
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    settings = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.2,
        "max_model_length": 32,  # half of which are sampled at a time
        "max_num_seqs": 8,
        "max_completion_length": 8,
        "engine_kwargs": SMALL,
    }
    accelerator = Accelerator(cpu=not GPU)
    possible = trial.Trial.of(policy, accelerator, settings)
    shared_memory = Path("/dev/shm")
    # vLLM's own name for the memory of such ranks: an engine that was killed leaves it behind.
    left_over = shared_memory / "-tp:0-[0-1]-cpushm_0"
    others = shared_memory / "trl_quant_others-cpushm_0"
    planted = [file for file in (left_over, others) if not file.exists()]
    for file in planted:
        file.touch()
    before = {*shared_memory.glob("trl_quant_*")}
    try:
        # On a CPU two engines run beside each other; two GPUs hold one at a time.
        with ThreadPoolExecutor(1 if GPU else 2) as pool:
            speeds = list(pool.map(trial.measure, [possible] * 2, ["int8"] * 2))
        for speed in speeds:
            assert isinstance(speed, trial.Speed), (speed, *(done.stderr[-4000:] for done in ended))
            assert 0 < speed.step < 10 and 0 < speed.sync < 10
        impossible = settings | {"engine_kwargs": SMALL | {"kv_cache_memory_bytes": 1}}
        reason = trial.measure(trial.Trial.of(policy, accelerator, impossible), "int8")
        assert "memory" in reason and "Error: " in reason and "\n" not in reason
        assert others.exists()
    finally:
        for file in planted:
            file.unlink(missing_ok=True)
    os.rmdir(short)  # which is empty
    assert not [*tmp_path.iterdir()]
    # Engines of other tests have files while they start.
    assert any(time.sleep(1) or before >= {*shared_memory.glob("trl_quant_*")} for _ in range(60))


def test_a_result_is_printed_in_one_piece(monkeypatch):
    """With the end of its line, so that no other rank's line gets between the two: here a read gets one write."""
    reads, writes = os.pipe2(os.O_DIRECT)
    monkeypatch.setattr(trial, "build", lambda *args: {}["no engine"])
    output = os.dup(1)
    try:
        os.dup2(writes, 1)
        trial.main(base64.b64encode(pickle.dumps((None, "int8"))).decode())
        os.set_blocking(reads, False)
        printed = os.read(reads, 4096).decode()
        with pytest.raises(BlockingIOError):
            os.read(reads, 4096)
    finally:
        os.dup2(output, 1)
        for number in (reads, writes, output):
            os.close(number)
    assert printed == trial.RESULT_LINE + '{"error": "KeyError: \'no engine\'"}\n'


def test_a_process_without_a_result(model, monkeypatch):
    """What it printed last is the reason."""
    monkeypatch.setattr(trial, "__name__", "trl_quant.no_such_module")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    reason = trial.measure(trial.Trial.of(policy, Accelerator(cpu=True), {}), "int8")
    assert "no_such_module" in reason and "\n" not in reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, sys; print('bad chunk', file=sys.stderr, flush=True); os.abort()", "killed by SIGABRT: bad chunk"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("raise SystemExit('ValueError: no')", "ValueError: no"),
    ],
)
def test_how_a_process_ended(program, reason):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert trial.end_of(done) == reason
