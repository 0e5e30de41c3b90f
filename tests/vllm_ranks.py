"""Two ranks that train with colocated vLLM engines, tensor or data parallel: the script of their tests, CPU and GPU.

torchrun --nproc-per-node 2 tests/vllm_ranks.py tp int8 full DIRECTORY      # with a policy in DIRECTORY/model
"""

import os
import socket
import subprocess
import sys
from pathlib import Path


def launch(mode: str, precision: str, tuning: str, path: Path) -> None:
    """Runs two ranks on the policy in `path`/model; both must end with the engine that they should have."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    command = [sys.executable, *launcher, __file__, mode, precision, tuning, path]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    print(*results, sep="\n")
    assert done.returncode == 0 and len(results) == 2, (done.stdout + done.stderr)[-4000:]
    assert all("same True" in line for line in results)


def train(mode: str, precision: str, tuning: str, path: Path) -> None:
    """One rank: three steps with a self-check each, then its engine against one that vLLM starts on the weights."""
    import torch
    from training import config, dataset, lora, make
    from vllm_engines import GPU, SMALL, fresh, greedy, keep

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    size = {"tp": 2, "dp": 1}[mode]
    args = config(
        QuantGRPOConfig,
        path / "out",
        bf16=GPU,
        use_cpu=not GPU,
        use_vllm=True,
        vllm_mode="colocate",
        rollout_precision=precision,
        vllm_tensor_parallel_size=size,
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=512,
        vllm_engine_kwargs=SMALL,
        max_steps=3,
        sync_check_steps=1,
    )
    peft_config = lora() if tuning == "lora" else None
    model = str(path / "model")
    trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
    keep(trainer)
    before = [param.detach().clone() for param in trainer.model.parameters() if param.requires_grad]
    trainer.train()
    after = [param.detach() for param in trainer.model.parameters() if param.requires_grad]
    assert not all(map(torch.equal, before, after))
    trainer.check_sync()
    ours = greedy(trainer.vllm_generation.llm)
    options = {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
    theirs = greedy(fresh(trainer.model, precision, path / "fresh", **options))
    checks = [log["sync_check/logp_difference"] for log in trainer.state.log_history if "sync_check/bound" in log]
    print(
        f"RESULT {mode} {precision} {tuning} rank {os.environ['RANK']}: same {ours == theirs}, checks {checks}",
        flush=True,
    )
    os._exit(len(checks) != 3)  # two engines and a process group: nobody knows in which order they end


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    train(*sys.argv[1:4], Path(sys.argv[4]))
