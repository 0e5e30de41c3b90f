"""Two ranks that train with colocated vLLM engines, on a model that each rank holds whole or in parts, CPU or GPUs."""

from pathlib import Path

from ranks import on_two_ranks, results


# mode -> (accelerate's configuration, tensor parallel size of the engine); `unified` trains in what it samples in,
# `exact` with the same kernels. In `beside` and `split` the adapter stays beside a base in codes, or in sharded
# weights. In `spread`, `gathered` and `partitioned` the policy is a mixture of experts
MODES = {
    "tp": ("ddp", 2),
    "dp": ("ddp", 1),
    "fsdp2": ("fsdp2", 1),
    "unified": ("fsdp2", 1),
    "beside": ("ddp", 1),
    "split": ("fsdp2", 1),
    "exact": ("ddp", 1),
    "zero2": ("zero2", 1),
    "zero3": ("zero3", 2),
    "spread": ("ddp", 2),
    "gathered": ("fsdp2", 1),
    "partitioned": ("zero3", 2),
}


BESIDE = ("beside", "split")
MIXED = ("spread", "gathered", "partitioned")
GRAPHS = ("enforce_eager", "compilation_config")  # which `exact_rollouts` chooses


def launch(mode: str, precision: str, tuning: str, path: Path) -> None:
    """Trains the policy in `path`/model on two ranks; both must end with the engine that they should have."""
    case = f"{mode}-{precision}-{tuning}"
    check(case, results(path, case, on_two_ranks(MODES[mode][0], path, case)))


def launch_exact(precision: str, tuning: str, path: Path) -> None:
    """Trains with `exact_rollouts` on two ranks: on both, no log-probability differs from its engine's by a bit."""
    case = f"exact-{precision}-{tuning}"
    for result in results(path, case, on_two_ranks(MODES["exact"][0], path, case)):
        print(case, result, flush=True)
        assert result["same"] == [1, 1, 1] and result["largest_difference"] == 0 < result["update_of_last_step"]


def check(case: str, found: list[dict]) -> None:
    """Both ranks synced and checked it, and their engines end as vLLM starts them on the trained weights."""
    print(case, *found, sep="\n", flush=True)
    for result in found:
        assert result["equals_trained"] and not result["equals_untrained"] and len(result["checks"]) == 2
        assert result["update_of_last_step"] > 0


def train(mode: str, precision: str, tuning: str, path: Path) -> dict:
    """One rank: three steps, two with a self-check, then its engine against one that vLLM starts on the weights."""
    from training import config, dataset, lora, make
    from vllm_engines import GPU, SMALL, allow_experts, fresh, greedy, keep

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
    from trl_quant.rollout.vllm.support import RANK_ON_CPU

    size = MODES[mode][1]
    args = config(
        QuantGRPOConfig,
        path / "out",
        bf16=GPU,
        use_cpu=not GPU,
        use_vllm=True,
        vllm_mode="colocate",
        rollout_precision=precision,
        train_precision=precision if mode in ("unified", "exact", *BESIDE) else None,
        lora_sync="adapter" if mode in BESIDE else None,
        exact_rollouts=mode == "exact",
        vllm_tensor_parallel_size=size,
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=512,
        vllm_engine_kwargs={k: v for k, v in SMALL.items() if mode != "exact" or k not in GRAPHS},
        max_steps=3,
        sync_check_steps=2,
        save_strategy="steps",
        save_steps=3,
    )
    peft_config = lora() if tuning == "lora" else None
    model = path.parent / ("mixture" if mode in MIXED else "model")
    if mode in MIXED:
        allow_experts()
    trainer = make(QuantGRPOTrainer, args, model=str(model), train_dataset=dataset(32), peft_config=peft_config)
    keep(trainer)
    if mode == "exact":
        return train_exactly(trainer, path)
    before = greedy(trainer.vllm_generation.llm)  # the checkpoint's, as vLLM loads it
    trainer.train()
    update = trainer.vllm_generation.engine.update_since_sync()
    trainer.check_sync()
    ours = greedy(trainer.vllm_generation.llm)
    trainer.save_model(path / "trained")
    trainer.accelerator.wait_for_everyone()
    if mode in BESIDE:
        return beside(trainer, precision, before, ours, path)
    options = {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
    if mode in MIXED and precision != "bf16":  # vLLM would quantize routers too
        options |= {"prepared": True, "device": "cuda"}
    if size > 1 and not GPU:
        options["worker_cls"] = RANK_ON_CPU  # else its shared memory is everybody's, and outlives it
    theirs = greedy(fresh(saved(path, tuning, trainer.model, model), precision, path / "fresh", **options))
    checks = [log["sync_check/logp_difference"] for log in trainer.state.log_history if "sync_check/bound" in log]
    return {
        "mismatch": max(log.get("mismatch/kl_k3", 0) for log in trainer.state.log_history),
        "equals_trained": ours == theirs,
        "equals_untrained": ours == before,
        "checks": checks,
        "update_of_last_step": update,
    }


def beside(trainer, precision: str, before, ours, path: Path) -> dict:
    """One rank: its engine against another one that gets the saved adapter beside the same base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from vllm_engines import engine, greedy

    from trl_quant.layers import FrozenLinear

    held = [layer for layer in trainer.model.modules() if isinstance(layer, FrozenLinear)]
    model = AutoModelForCausalLM.from_pretrained(path.parent / "model", dtype="auto")
    model = PeftModel.from_pretrained(model, path / "trained")
    other = engine(model, precision, lora_sync="adapter")
    other.sync()
    theirs = greedy(other.llm)
    checks = [log["sync_check/logp_difference"] for log in trainer.state.log_history if "sync_check/bound" in log]
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "layers": len(held),
        "equals_trained": ours == theirs,
        "equals_untrained": ours == before,
        "checks": checks,
        "update_of_last_step": norms[-1],
    }


def train_exactly(trainer, path: Path) -> dict:
    """One rank: three steps, and how far its engine's log-probabilities were from the policy's."""
    trainer.train()
    logged = [log for log in trainer.state.log_history if "mismatch/same_fraction" in log]
    return {
        "same": [log["mismatch/same_fraction"] for log in logged],
        "largest_difference": max(log["sampling/sampling_logp_difference/max"] for log in logged),
        "update_of_last_step": trainer.vllm_generation.engine.update_since_sync(),
    }


def saved(path: Path, tuning: str, trained, model: Path):
    """The policy as the trainer saved it, in the dtype that it trained in."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # ZeRO-3 would split what is loaded here too
    source = path / "trained" if tuning == "full" else model
    model = AutoModelForCausalLM.from_pretrained(source, dtype=trained.dtype)
    if tuning == "lora":
        model = PeftModel.from_pretrained(model, path / "trained", autocast_adapter_dtype=False)
    return model.to(trained.device)
