"""Measures the speed of the run's engine in separate processes, with a policy of the same shape.

[`measure`] starts one process for each rank of the engine. They build a [`~engine.VLLMEngine`] with the arguments that
TRL gave for the run's own engine, sync it, and sample. They leave no files.
"""

import base64
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig

from ...reading import reading
from ...storage.source import skeleton
from ..engine import requests_for
from .engine import VLLMEngine


PROMPT_TOKENS = 64
NEW_TOKENS = 64  # tokens of each completion that are measured, in the middle of it
REPEATS = 3
# Prefixes of the variables that a launcher sets, which a trial must not inherit
LAUNCHERS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE")
RESULT_LINE = "result of the trial: "


@dataclass(frozen=True)
class Speed:
    """
    The speed of an engine.

    Attributes:
        step (`float`): Seconds to decode one token of each completion, in the middle of a completion.
        sync (`float`): Seconds of one sync.
    """

    step: float
    sync: float

    def rate(self, batch: int, length: int) -> float:
        """Returns tokens per second for `batch` completions of `length` tokens each, including one sync."""
        return batch * length / (self.sync + length * self.step)


@dataclass(frozen=True)
class Trial:
    """
    Everything that another process needs to build an engine like the run's.

    Attributes:
        model (`str`): Name or path of the policy.
        dtype (`torch.dtype`): Type of the policy's weights.
        trained_dtype (`torch.dtype`): Type of the trained weights.
        adapters (`dict[str, PeftConfig]`): The policy's active adapters.
        conversions (`list` or `None`): What transformers has done to the checkpoint's tensors as it loaded the policy,
            from which it knows their names on disk; `None` if it has loaded none.
        on_cpu (`bool`): Whether the run is on a CPU.
        settings (`dict`): The arguments of the run's engine, TRL's and ours, without the precision.
    """

    model: str
    dtype: torch.dtype
    trained_dtype: torch.dtype
    adapters: dict[str, PeftConfig]
    conversions: list | None
    on_cpu: bool
    settings: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, accelerator: Accelerator, settings: dict[str, Any]) -> "Trial":
        """Returns the trial for a policy and the `settings` of its engine."""
        trained_dtypes = [param.dtype for param in model.parameters() if param.requires_grad]
        active_adapters = model.active_adapters if is_peft_model(model) else []
        return cls(
            model=model.name_or_path,
            dtype=model.dtype,
            trained_dtype=trained_dtypes[0] if trained_dtypes else model.dtype,
            adapters={name: model.peft_config[name] for name in active_adapters},
            conversions=getattr(model.get_base_model() if is_peft_model(model) else model, "_weight_conversions", None),
            on_cpu=accelerator.device.type == "cpu",
            settings=settings,
        )

    @property
    def batch(self) -> int:
        """Number of completions that one engine samples at a time."""
        return self.settings["max_num_seqs"]

    @property
    def length(self) -> int:
        """Largest number of tokens in a completion."""
        given = self.settings.get("generation_kwargs") or {}
        return given.get("max_tokens", self.settings["max_completion_length"])

    @property
    def ranks(self) -> int:
        """Number of processes that form one engine."""
        return self.settings.get("tensor_parallel_size", 1)


# Functions of the run's process


def measure(trial: Trial, precision: str) -> Speed | str:
    """Returns the speed of an engine in `precision`, or one line with the reason why it did not start."""
    launcher = [sys.executable]
    if trial.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={trial.ranks}"]
    payload = base64.b64encode(pickle.dumps((trial, precision))).decode()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "TMPDIR": temporary}
        command = [*launcher, "-m", __name__, payload]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    printed = [line.partition(RESULT_LINE)[2] for line in done.stdout.splitlines() if RESULT_LINE in line]
    results = [json.loads(result) for result in printed]
    for result in results:
        if "error" in result:
            return result["error"]
    return Speed(**results[0]) if results else end_of(done)


def end_of(done: subprocess.CompletedProcess) -> str:
    """Returns one line that says how a process ended, and what it printed last."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    words = (errors or lines)[-1:]
    if done.returncode < 0:
        return ": ".join([f"killed by {signal.Signals(-done.returncode).name}", *words])
    return words[0] if words else f"ended with code {done.returncode}"


# Functions of the trial's processes


def policy_like(trial: Trial) -> nn.Module:
    """Builds a policy with the run's names, shapes and types on the meta device."""
    trust = trial.settings.get("trust_remote_code", False)
    with reading(trial.model):
        config = AutoConfig.from_pretrained(trial.model, trust_remote_code=trust)
    policy = skeleton(config, trust).to(trial.dtype)
    policy.name_or_path, policy._weight_conversions = trial.model, trial.conversions
    for name, config in trial.adapters.items():
        config = copy.copy(config)
        config.init_lora_weights = True  # other initializations read the base's weights
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
    """
    Gives a policy on the meta device random weights. Weights of one shape and type share memory: they stream like those
    of a real policy, and most of the device stays free.
    """
    generator = torch.Generator(device).manual_seed(0)  # the same on all ranks, which must sample the same tokens
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
    """
    Builds an engine like the run's, with a policy that gets memory only afterwards. Its completions ignore EOS, so that
    all have the same length. It does not speculate: a policy with random weights accepts other drafts than the run's.
    """
    sampling = dict(trial.settings.get("generation_kwargs") or {})
    sampling.pop("max_tokens", None)
    sampling.pop("min_tokens", None)
    sampling["ignore_eos"] = True
    settings = trial.settings | {"generation_kwargs": sampling, "sync_check_steps": 0}
    given = dict(settings.get("engine_kwargs") or {})
    given.pop("speculative_config", None)
    settings["engine_kwargs"] = given
    engine = VLLMEngine(policy_like(trial), Accelerator(cpu=trial.on_cpu), None, precision=precision, **settings)
    fill(engine.model, engine.accelerator.device)
    return engine


def seconds(call: Callable, *args) -> float:
    """Returns the seconds of a call, including the GPU's work that it started."""
    start = time.perf_counter()
    call(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def try_out(engine: VLLMEngine, trial: Trial) -> Speed:
    """
    Measures a sync and a decoding step. The step is measured in the middle of completions, where the sequences have
    their mean length.
    """
    engine.sync()  # the first sync takes longer
    sync = min(seconds(engine.sync) for _ in range(REPEATS))

    longest = engine.limits()[1]
    new_tokens = max(2, min(NEW_TOKENS, longest // 2))
    prompt_tokens = min(PROMPT_TOKENS + max(0, trial.length - new_tokens) // 2, longest - new_tokens)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 200, (trial.batch, prompt_tokens), generator=generator).tolist()
    own_prompts = prompts[engine.accelerator.process_index :: trial.ranks]

    def decode(new_tokens: int) -> float:
        engine.settings = replace(engine.settings, max_completion_length=new_tokens)
        return seconds(engine.draw, requests_for(own_prompts))

    decode(new_tokens)  # compiles kernels and fills the prefix cache
    many_tokens, one_token = [], []
    for _ in range(REPEATS):
        many_tokens.append(decode(new_tokens))
        one_token.append(decode(1))
    decoding = max(min(many_tokens) - min(one_token), 1e-9)
    return Speed(decoding / (new_tokens - 1), sync)


def main(payload: str) -> None:
    """Runs one process of a trial and prints its result."""
    trial, precision = pickle.loads(base64.b64decode(payload))
    try:
        engine = build(trial, precision)
        result = asdict(try_out(engine, trial))
        if not engine.accelerator.is_main_process:
            return
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).partition("\n")[0]
        result = {"error": f"{type(error).__name__}: {first_line}"}
    # Writes the line and its newline in one call: where output is not buffered, as under torch's launcher, `print`
    # writes the newline separately, and another rank's line may come in between.
    os.write(1, f"{RESULT_LINE}{json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
