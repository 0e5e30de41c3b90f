"""What the engine benchmarks share: policies of any size without a checkpoint, engines with dummy weights."""

import atexit
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from trl_quant.precisions import in_vllm


SHAPES = {  # Qwen2.5
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "heads": 4, "kv_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "heads": 14, "kv_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "heads": 28, "kv_heads": 4},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "heads": 40, "kv_heads": 8},
}
CUDA = torch.cuda.is_available()
# What any CPU runs, without AMX
PRECISIONS = [name for name, vllm in in_vllm().items() if CUDA or (vllm.cpu and not vllm.amx)]


def machine() -> str:
    return torch.cuda.get_device_name() if CUDA else f"{platform.processor() or platform.machine()} CPU"


def model_directory(size: str) -> str:
    """A directory with only the config.json of a Qwen2.5 of this size."""
    from transformers import Qwen2Config

    shape = dict(SHAPES[size])
    config = Qwen2Config(
        vocab_size=152064 if size != "tiny" else 1024,
        num_attention_heads=shape.pop("heads"),
        num_key_value_heads=shape.pop("kv_heads"),
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        **shape,
    )
    path = tempfile.mkdtemp(prefix=f"trl-quant-bench-{size}-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    config.save_pretrained(path)
    return path


def policy(path: str, lora_rank: int = 0):
    """
    A BF16 policy with one layer's memory shared by all layers: it streams as many bytes as a real policy and leaves the
    GPU to the engine.
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
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config, device=device)  # the only buffers
    model.name_or_path = path
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, config).to(device)
    return model


def byte_tokenizer(text: str, add_special_tokens: bool = False) -> dict:
    return {"input_ids": list(text.encode())}


def build(kind: str, model, max_seqs: int, new_tokens: int, length: int, lora_sync: str = "merge", **arguments):
    """
    TRL's own engine (`kind="trl"`) or ours (`kind` is a precision), with dummy weights; `arguments` go to vLLM.
    """
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from trl_quant.rollout import VLLMEngine
    from trl_quant.rollout.seams import llm_with

    arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True, **arguments}
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
            return VLLMGeneration(model, accelerator, byte_tokenizer, **settings)
    options = {"engine_kwargs": arguments, "sync_check_steps": 0, "lora_sync": lora_sync}
    return VLLMEngine(model, accelerator, byte_tokenizer, precision=kind, **settings, **options)


def in_own_process(arguments: list[str], timeout: float) -> dict:
    """Reruns this benchmark for one engine, which then has the GPU to itself; returns its result or the error."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    command = [sys.executable, sys.argv[0], *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
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
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}-{machine().replace(' ', '-')}.json"
        path.write_text(json.dumps({"machine": machine(), "torch": torch.__version__, **results}, indent=2) + "\n")
        print(f"written to {path}")
