"""The run's engine on trial: the engine itself, in processes of its own, with a policy that is the run's in shape.

[`measure`] starts the processes, one for each rank of the engine, which build a [`~engine.VLLMEngine`] with the
arguments that TRL gave for the run's own, sync it, and sample. They leave no files.
"""

import base64
import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig

from .engine import VLLMEngine
from .support import skeleton


PROMPT_TOKENS = 64
NEW_TOKENS = 64  # of each completion, in the middle of the run's
REPEATS = 3
LAUNCHERS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE")
RESULT_LINE = "result of the trial: "


@dataclass(frozen=True)
class Speed:
    """
    What an engine takes.

    Attributes:
        step (`float`): Seconds of decoding one token of each completion, in the middle of a completion.
        sync (`float`): Seconds from the policy's weights to an engine that holds them.
    """

    step: float
    sync: float

    def rate(self, batch: int, length: int) -> float:
        """Tokens per second of `batch` completions of `length` tokens each, with the sync before them."""
        return batch * length / (self.sync + length * self.step)


@dataclass(frozen=True)
class Trial:
    """
    What other processes must know to build an engine like the run's.

    Attributes:
        model (`str`): Name or path of the policy.
        dtype (`torch.dtype`): Of its weights.
        trained_dtype (`torch.dtype`): Of those that are trained.
        adapters (`dict[str, PeftConfig]`): Its active adapters.
        on_cpu (`bool`): Whether the run is on a CPU.
        settings (`dict`): The arguments of the run's engine, TRL's and ours, but for the precision.
    """

    model: str
    dtype: torch.dtype
    trained_dtype: torch.dtype
    adapters: dict[str, PeftConfig]
    on_cpu: bool
    settings: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, accelerator: Accelerator, settings: dict[str, Any]) -> "Trial":
        """The trial for a policy and the `settings` of its engine."""
        return cls(
            model.name_or_path,
            model.dtype,
            next((param.dtype for param in model.parameters() if param.requires_grad), model.dtype),
            {name: model.peft_config[name] for name in model.active_adapters} if is_peft_model(model) else {},
            accelerator.device.type == "cpu",
            settings,
        )

    @property
    def batch(self) -> int:
        """Completions that one engine samples at a time."""
        return self.settings["max_num_seqs"]

    @property
    def length(self) -> int:
        """Tokens of a completion at most."""
        given = self.settings.get("generation_kwargs") or {}
        return given.get("max_tokens", self.settings["max_completion_length"])

    @property
    def ranks(self) -> int:
        """Processes that are one engine together."""
        return self.settings.get("tensor_parallel_size", 1)


# In the run's process


def measure(trial: Trial, precision: str) -> Speed | str:
    """The speed of an engine in `precision`, or in one line why there is none."""
    launcher = [sys.executable]
    if trial.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.ranks}"]
    payload = base64.b64encode(pickle.dumps((trial, precision))).decode()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "TMPDIR": temporary}
        command = [*launcher, "-m", __name__, payload]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    results = [line.partition(RESULT_LINE)[2] for line in done.stdout.splitlines() if RESULT_LINE in line]
    found = [json.loads(result) for result in results]
    if errors := [result["error"] for result in found if "error" in result]:
        return errors[0]
    if found:
        return Speed(**found[0])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"ended with code {done.returncode}"])[-1]


# In the processes of the trial


def policy_like(trial: Trial) -> nn.Module:
    """A policy with the run's names, shapes and types, without memory for its weights."""
    trust = trial.settings.get("trust_remote_code", False)
    policy = skeleton(AutoConfig.from_pretrained(trial.model, trust_remote_code=trust), trust).to(trial.dtype)
    policy.name_or_path = trial.model
    for name, config in trial.adapters.items():
        config = copy.copy(config)
        config.init_lora_weights = True  # others look at the base's weights
        with torch.device("meta"):
            if is_peft_model(policy):
                policy.add_adapter(name, config)
            else:
                policy = get_peft_model(policy, config, name)
    if len(trial.adapters) > 1:
        policy.base_model.set_adapter(list(trial.adapters))
    for param in policy.parameters():
        if param.requires_grad:
            param.data = param.data.to(trial.trained_dtype)
    return policy


def fill(policy: nn.Module, device: torch.device) -> None:
    """Gives weights of one shape and type one memory: they stream as a real policy's, and leave the device free."""
    generator = torch.Generator(device).manual_seed(0)  # the same on all ranks, which sample the same tokens
    memory: dict[tuple, torch.Tensor] = {}
    filled: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in policy.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            key = (param.shape, param.dtype)
            if key not in memory:
                memory[key] = torch.randn(param.shape, generator=generator, dtype=param.dtype, device=device).mul_(0.02)
            if param not in filled:
                filled[param] = nn.Parameter(memory[key], requires_grad=param.requires_grad)
            setattr(module, name, filled[param])


def build(trial: Trial, precision: str) -> VLLMEngine:
    """The run's engine, but that no policy stands beside it yet, and that completions do not end before their time."""
    sampling = (trial.settings.get("generation_kwargs") or {}) | {"ignore_eos": True}
    sampling = {name: value for name, value in sampling.items() if name not in ("max_tokens", "min_tokens")}
    settings = trial.settings | {"generation_kwargs": sampling, "sync_check_steps": 0}
    engine = VLLMEngine(policy_like(trial), Accelerator(cpu=trial.on_cpu), None, precision=precision, **settings)
    fill(engine.model, engine.accelerator.device)
    return engine


def seconds(call: Callable, *args) -> float:
    """Of a call and of what it left the GPU to do."""
    start = time.perf_counter()
    call(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def try_out(engine: VLLMEngine, trial: Trial) -> Speed:
    """Syncs, and decodes the tokens in the middle of completions, where their keys and values are of mean length."""
    engine.sync_weights()  # the first takes longer
    sync = min(seconds(engine.sync_weights) for _ in range(REPEATS))

    longest = engine.limits()[1]
    new_tokens = max(2, min(NEW_TOKENS, longest // 2))
    before = min(PROMPT_TOKENS + max(0, trial.length - new_tokens) // 2, longest - new_tokens)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 200, (trial.batch, before), generator=generator).tolist()
    mine = prompts[engine.accelerator.process_index :: trial.ranks]

    def decode(new_tokens: int) -> float:
        engine.max_completion_length = new_tokens
        return seconds(engine.generate, mine, None, 1)

    decode(new_tokens)  # compiles kernels and fills the prefix cache
    times = [(decode(new_tokens), decode(1)) for _ in range(REPEATS)]
    long, short = map(min, zip(*times, strict=True))
    return Speed(max(long - short, 1e-9) / (new_tokens - 1), sync)


def main(payload: str) -> None:
    """One process of a trial: prints what it found."""
    trial, precision = pickle.loads(base64.b64decode(payload))
    try:
        engine = build(trial, precision)
        found = asdict(try_out(engine, trial))
        if not engine.accelerator.is_main_process:
            return
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
    print(f"{RESULT_LINE}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
