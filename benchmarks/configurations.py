"""
Writes the configuration of each published step, for `trl-quant train --config`, into `configs/figures`.

    python benchmarks/configurations.py

A configuration has the settings with which the benchmark builds its trainer on a GPU, by the benchmark's own functions,
but for what only measures: lengths that are prescribed, random weights, a fixed number of steps, no self-checks. The
model is one of the shape that was measured, and the data are the command's defaults.
"""

import shlex
from pathlib import Path

import diffusion
import memory
import step
import step_runs
import yaml
from engines import SHAPES, adapted_layers


DIRECTORY = Path(__file__).parents[1] / "configs" / "figures"
MODELS = {
    "7b": "Qwen/Qwen2.5-7B-Instruct",
    "32b": "Qwen/Qwen2.5-32B-Instruct",
    "30b-a3b": "Qwen/Qwen3-30B-A3B",
    "70b": "meta-llama/Llama-3.3-70B-Instruct",
    "8b": "GSAI-ML/LLaDA-8B-Instruct",
}
AT_33 = "--micro 8 --vllm_gpu_memory_utilization 0.33"
# Name of a configuration -> the benchmark's command for it alone
FIGURES = {
    "7b-fp8-64x4096": f"step.py --trainers fp8/fp8 --completions 64x4096:lognormal {AT_33}",
    "7b-fp8-64x1024": f"step.py --trainers fp8/fp8 --completions 64x1024 {AT_33}",
    "7b-fp8-256x512": f"step.py --trainers fp8/fp8 --completions 256x512 {AT_33}",
    "7b-fp8-liger-64x1024": f"step.py --trainers fp8/fp8+liger --completions 64x1024 {AT_33}",
    "7b-fp8-sampling-64x1024": f"step.py --trainers fp8 --completions 64x1024 {AT_33}",
    "7b-fp8-block-exact-64x4096": "step.py --trainers fp8_block/fp8_block/exact --completions 64x4096:lognormal "
    + AT_33,
    "7b-int8-exact-64x1024": f"step.py --trainers int8/int8/exact --completions 64x1024 {AT_33}",
    "7b-rloo-fp8-64x512": "step.py --trainers rloo:fp8/fp8 --completions 64x512 --micro 16 "
    "--vllm_gpu_memory_utilization 0.33",
    "32b-fp8-64x512": "step.py --sizes 32b --trainers fp8/fp8/adapter --micro 16 --completions 64x512 "
    "--vllm_gpu_memory_utilization 0.5",
    "32b-nvfp4-64x512": "step.py --sizes 32b --trainers nvfp4/nvfp4 --micro 16 --completions 64x512 "
    "--vllm_gpu_memory_utilization 0.5",
    "30b-a3b-fp8-64x256": "step.py --sizes 30b-a3b --trainers fp8/fp8/adapter+replay --micro 64 --completions 64x256 "
    "--vllm_gpu_memory_utilization 0.33",
    "8b-diffusion-fp8-4x256": "diffusion.py --size 8b --precisions fp8 --completions 4",
    "8b-diffusion-fp8-16x256": "diffusion.py --size 8b --precisions fp8 --completions 16",
    "32b-nvfp4-memory": "memory.py --sizes 32b --kinds nvfp4",
    "70b-nvfp4-memory": "memory.py --sizes 70b --kinds nvfp4",
}


def configuration(command: str) -> dict:
    """Returns the options of `trl-quant train` for the one trainer and the one shape of a benchmark's command."""
    script, *words = shlex.split(command)
    if script == "step.py":
        args = step.options(cuda=True).parse_args(words)
        (size,), (name,) = args.sizes, args.trainers
        trainer, settings = step_runs.parts_of(name)[0], step.settings_of(args, name, cuda=True)
    elif script == "diffusion.py":
        args = diffusion.options(cuda=True).parse_args(words)
        size, trainer, (precision,) = args.size, "diffusion", args.precisions
        settings = diffusion.settings_of(args, precision, cuda=True)
    else:
        args = memory.options(cuda=True).parse_args(words)
        (size,), trainer, (kind,) = args.sizes, "grpo", args.kinds
        cache = {"kv_cache_memory_bytes": memory.cache_of(args, args.prompt + args.new)}
        settings = memory.settings_of(args, kind, cuda=True) | {"vllm_engine_kwargs": cache}
    return {
        "model_name_or_path": MODELS[size],
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": args.lora,
        "lora_alpha": 2 * args.lora,
        "lora_target_modules": adapted_layers("num_experts" in SHAPES.get(size, {})),
        "trainer": trainer,
    } | settings


def text_of(name: str) -> str:
    """Returns the file of a configuration."""
    head = f"# Measured by: python benchmarks/{FIGURES[name]}\n# Written by: python benchmarks/configurations.py\n"
    return head + yaml.safe_dump(configuration(FIGURES[name]), sort_keys=False)


def main():
    DIRECTORY.mkdir(exist_ok=True)
    for name in FIGURES:
        (DIRECTORY / f"{name}.yaml").write_text(text_of(name))


if __name__ == "__main__":
    main()
