"""Two ranks, started by the command that a user gives: the launcher that tests call, and the script that it runs.

Launcher and ranks are forks where there is no GPU (`warm`), and the script trains several cases one after another:

    accelerate launch --num_processes 2 tests/helpers/ranks.py DIRECTORY embedded-int8-full tp-int8-lora

A case is a mode, a precision and a tuning; `embedded` is the embedded engine, `rloo` the same with RLOO, `distilled`
the same with distillation, `experts` the same with a mixture of experts, in DIRECTORY/mixture, `hybrid` the same with a
hybrid, in DIRECTORY/hybrid, `truncated` the same with `top_p` and scaled steps, `passes` the same with and without a
scoring pass, `packed` the same with packed rows and padded ones, `trained` the same in a `train_precision`, `broken`
the same with steps that are not finite, `late` the same with a rank that is late to save, `masked` the same with a
masked diffusion model, `async` is in `async_ranks`, `ppo` in `ppo_ranks`, `sharded` in `fsdp_ranks`, `qat` in
`qat_ranks`, `turns` in `turn_ranks`, the others in `vllm_ranks`.
The policy is in DIRECTORY/model. Each rank writes what it found to DIRECTORY/CASE/rank-N.json.
"""

import json
import os
import socket
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch
from zipfile import is_zipfile

import pytest
import torch
import warm
from places import ROOT


CONFIGS = ROOT / "configs" / "accelerate"


def on_two_ranks(configuration: str, path: Path, *cases: str) -> str:
    """Trains `cases` on two GPUs, or on this CPU without mixed precision; returns what the ranks printed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{configuration}.yaml"]
    launcher += ["--num_processes", 2, "--main_process_port", port]
    launcher += [] if torch.cuda.is_available() else ["--mixed_precision", "no"]
    command = [sys.executable, *launcher, __file__, path, *cases]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = warm.run(command, env=environment, capture_output=True)
    return f"{done.stdout}{done.stderr}\nThe ranks ended with {done.returncode}."


def on_demand(tmp_path_factory, launches: dict[str, tuple[str, list[str]]]):
    """
    What both ranks found in a case of a launch, which runs when the first of its cases is asked for. A launch has a
    configuration of accelerate and cases.
    """
    from tiny import save_tiny

    @cache
    def launched(launch: str) -> tuple[Path, str]:
        configuration, cases = launches[launch]
        path = tmp_path_factory.mktemp(launch)
        save_tiny(path / "model", "qwen2", dtype=torch.bfloat16)
        save_tiny(path / "mixture", "qwen3_moe", dtype=torch.bfloat16)
        save_tiny(path / "hybrid", "falcon_h1", dtype=torch.bfloat16)
        return path, on_two_ranks(configuration, path, *cases)

    def found(launch: str, case: str) -> list[dict]:
        if launch.startswith("zero") and not find_spec("deepspeed"):  # only the ranks need to import it
            pytest.skip("deepspeed is not installed")
        path, printed = launched(launch)
        return results(path, case, printed)

    return found


def results(path: Path, case: str, printed: str) -> list[dict]:
    """What each rank found; fails with what was printed where a rank did not get to the end of the case."""
    files = sorted((path / case).glob("rank-*.json"))
    assert len(files) == 2, printed[-4000:]
    return [json.loads(file.read_text()) for file in files]


def shard_on_cpu() -> None:
    """Has accelerate shard policies with FSDP here too: without this it trains them with DDP on CPUs, silently."""
    from accelerate import DistributedType, PartialState

    start = PartialState.__init__

    def started(self, *args, **kwargs):
        start(self, *args, **kwargs)
        shards = os.environ.get("ACCELERATE_USE_FSDP") == "true"
        if shards and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_HPU  # of those that it shards on

    PartialState.__init__ = started


def train_embedded(mode: str, precision: str, tuning: str, path: Path) -> list[dict]:
    """Three steps with the embedded engine, whose gradients nothing clips; what they logged."""
    from training import dataset, lora, trainer_for

    from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantRLOOTrainer

    kind = {"rloo": QuantRLOOTrainer, "distilled": QuantDistillationTrainer}.get(mode, QuantGRPOTrainer)
    settings = {"rollout_precision": precision, "max_steps": 3, "max_grad_norm": 0.0, "beta": 0.0}
    options = {"train_dataset": dataset(32), "peft_config": lora() if tuning == "lora" else None}
    settings |= {"is_correction": "tis"} if mode == "distilled" else {}
    settings |= {"top_p": 0.9, "ess_step_scaling": True} if mode == "truncated" else {}
    model = path.parent / {"experts": "mixture", "hybrid": "hybrid"}.get(mode, "model")
    trainer = trainer_for(path / "out", str(model), kind, **options, **settings)
    trainer.train()
    names = ("mismatch/kl_k3", "sampling/sampling_logp_difference/max", "reward", "entropy")
    names += ("weights/normalized_quantization_error", "weights/normalized_update")
    names += ("truncation/kept_mass", "step_scaling/factor") if mode == "truncated" else ()
    return [{name: log.get(name) for name in names} for log in trainer.state.log_history if "loss" in log]


def train_in_passes(precision: str, tuning: str, path: Path) -> list[dict]:
    """Three steps of two micro-batches, scored in the loss and before it; what both logged, and the weights' sums."""
    from training import config, dataset, lora, make, metrics, parameters

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    found = []
    for one_pass in (True, False):
        settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "is_correction": "decoupled"}
        args = config(QuantGRPOConfig, path / "out", rollout_precision=precision, max_steps=3, **settings)
        model, peft_config = str(path.parent / "model"), lora() if tuning == "lora" else None
        torch.manual_seed(0)
        trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
        assert trainer.one_pass
        trainer.one_pass = one_pass
        trainer.train()
        weights = {name: value.double().sum().item() for name, value in parameters(trainer).items()}
        found.append({"log": metrics(trainer)[:3], "weights": weights})
    return found


def train_in_precision(precision: str, tuning: str, path: Path) -> dict:
    """Three steps with a `train_precision`; what they logged, and the weights' sums."""
    from training import config, dataset, lora, make, metrics, parameters

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
    from trl_quant.layers import FrozenLinear, UnifiedLinear

    args = config(QuantGRPOConfig, path / "out", train_precision=precision, max_steps=3)
    model = str(path.parent / "model")
    peft_config = lora() if tuning == "lora" else None
    trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    sums = {name: value.double().sum().item() for name, value in after.items()}
    quantized = {
        n: m for n, m in trainer.model.named_modules() if hasattr(m, "codes") and not isinstance(m, FrozenLinear)
    }
    codes = {name: layer.codes().scale for name, layer in quantized.items()}
    for layer in trainer.model.modules():
        if isinstance(layer, UnifiedLinear):
            layer.forget()
    stale = [name for name, scale in codes.items() if not scale.equal(trainer.model.get_submodule(name).codes().scale)]
    return {"log": metrics(trainer)[:3], "weights": sums, "moved": moved, "codes": len(codes), "stale": stale}


def train_packed(precision: str, tuning: str, path: Path) -> dict:
    """
    Two updates on one generation, each in two micro-batches, with packed rows and without: by how much the ends differ,
    in lengths of the way, and how many tokens each computed.
    """
    from fsdp_ranks import gap, whole
    from training import UnevenLengths, config, dataset, lora, make

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    class Uneven(UnevenLengths, QuantGRPOTrainer):
        pass

    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2}
    settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_completion_length": 24, "beta": 0.1}
    ends, computed = [], []
    for packs in (True, False):
        args = config(QuantGRPOConfig, path, rollout_precision=precision, pack_sequences=packs, **settings)
        torch.manual_seed(0)
        model, peft_config = str(path.parent / "model"), lora() if tuning == "lora" else None
        trainer = make(Uneven, args, model=model, train_dataset=dataset(32), peft_config=peft_config)
        start, widths = whole(trainer), []
        hook = trainer.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, given, widths=widths: widths.append(given[0].numel())
        )
        trainer.train()
        hook.remove()
        ends.append(whole(trainer))
        computed.append(sum(widths))
    return {"gap": gap(*ends, start), "computed": computed}


def train_masked(precision: str, tuning: str, path: Path) -> dict:
    """
    Four updates of a masked diffusion policy, two on each generation, each in two micro-batches: the rows that copy and
    policy computed on this rank, under their masks, what was logged, and the weights' sums.
    """
    from collections import Counter

    from masked_policy import canvases, policy, trainer
    from training import dataset, lora, metrics, parameters

    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    settings |= {"rollout_precision": precision, "is_correction": "ais", "max_grad_norm": 0.0}
    given = {"train_dataset": dataset(32), "peft_config": lora() if tuning == "lora" else None}
    made = trainer(path / "out", model=policy(ends=range(40)), given=given, **settings)
    with canvases() as seen:
        made.train()
    rows = {"copy": Counter(), "policy": Counter()}
    for model, draw, row in seen:
        rows["copy" if model is made.vllm_generation.engine.copy else "policy"][str((draw, row))] += 1
    sums = {name: value.double().sum().item() for name, value in parameters(made).items()}
    return {"rows": rows, "log": [log for log in metrics(made) if "loss" in log], "weights": sums}


def train_with_a_reward(hangs: bool, precision: str, path: Path) -> dict:
    """Four steps, the third with a reward that hangs on the first rank, or what a resumed run has left of them."""
    from training import config, dataset, make, spread

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    def hangs_at_two(completions, trainer_state, **kwargs) -> list[float]:
        if hangs and trainer_state.global_step == 2 and os.environ["RANK"] == "0":
            time.sleep(600)
        return spread(completions)

    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "reward_timeout": 3.0, "ddp_timeout": 60}
    args = config(QuantGRPOConfig, path / "out", rollout_precision=precision, **settings)
    options = {"model": str(path / "model"), "train_dataset": dataset(32), "reward_funcs": hangs_at_two}
    trainer, error = make(QuantGRPOTrainer, args, **options), None
    try:
        trainer.train(resume_from_checkpoint=not hangs)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "steps": [log["step"] for log in trainer.state.log_history if "loss" in log]}


def train_late(precision: str, tuning: str, path: Path) -> list[str]:
    """One step, after which the second rank is late to save; the states found as the checkpoint is marked as whole."""
    from training import config, dataset, lora, make
    from transformers import TrainerState

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    found, save, mark = [], torch.save, TrainerState.save_to_json

    def late(state, path, *args, **kwargs) -> None:
        if str(path).endswith("rng_state_1.pth"):
            time.sleep(2.0)
        save(state, path, *args, **kwargs)

    def marked(self, json_path) -> None:
        found.extend(sorted(file.name for file in Path(json_path).parent.glob("rng_state*") if is_zipfile(file)))
        mark(self, json_path)

    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = config(QuantGRPOConfig, path / "out", rollout_precision=precision, **settings)
    peft_config = lora() if tuning == "lora" else None
    options = {"model": str(path.parent / "model"), "train_dataset": dataset(32), "peft_config": peft_config}
    with patch.object(torch, "save", late), patch.object(TrainerState, "save_to_json", marked):
        make(QuantGRPOTrainer, args, **options).train()
    return found


def train_broken(precision: str, tuning: str, path: Path) -> dict:
    """Three steps, in the second of which something becomes NaN on the second rank alone; what became of the run."""
    from broken import Broken
    from safetensors.torch import load_file
    from training import config, dataset, make

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer

    found, second = {}, os.environ["RANK"] == "1"
    for place in ("gradient", "loss", "weight"):
        settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
        args = config(QuantGRPOConfig, path / place, rollout_precision=precision, **settings)
        callbacks = [Broken(2, place=place)] if second and place == "weight" else []
        model = str(path.parent / "model")
        trainer = make(QuantGRPOTrainer, args, model=model, train_dataset=dataset(32), callbacks=callbacks)
        if second and place != "weight":  # NaN has a gradient that is NaN, and a constant has none
            trainer.compute_loss = partial(_broken_loss, trainer, trainer.compute_loss, place)
        try:
            trainer.train()
            error = "none"
        except RuntimeError as raised:
            error = str(raised)
        (saved,) = (path / place).glob("checkpoint-*")
        finite = all(tensor.isfinite().all() for tensor in load_file(saved / "model.safetensors").values())
        steps = trainer.state.global_step
        found[place] = {"error": error, "steps": steps, "checkpoints": [saved.name], "finite": bool(finite)}
    return found


def _broken_loss(trainer, compute, place, *args, **kwargs) -> torch.Tensor:
    loss = compute(*args, **kwargs)
    if trainer.state.global_step != 1:
        return loss
    return loss * torch.nan if place == "gradient" else loss + torch.inf


def run(path: Path, case: str) -> None:
    """One rank of one case."""
    mode, precision, tuning = case.split("-")
    (path / case).mkdir(exist_ok=True)
    torch.manual_seed(0)  # of new adapters
    if mode in ("embedded", "experts", "hybrid", "rloo", "distilled", "truncated"):
        found = train_embedded(mode, precision, tuning, path / case)
    elif mode == "ppo":
        from ppo_ranks import train

        found = train(precision, tuning, path / case)
    elif mode == "async":
        from async_ranks import train

        found = train(case, path / case)
    elif mode == "passes":
        found = train_in_passes(precision, tuning, path / case)
    elif mode == "packed":
        found = train_packed(precision, tuning, path / case)
    elif mode == "masked":
        found = train_masked(precision, tuning, path / case)
    elif mode == "trained":
        found = train_in_precision(precision, tuning, path / case)
    elif mode in ("hanging", "resuming"):
        found = train_with_a_reward(mode == "hanging", precision, path)
    elif mode == "late":
        found = train_late(precision, tuning, path / case)
    elif mode == "broken":
        found = train_broken(precision, tuning, path / case)
    elif mode == "qat":
        from qat_ranks import train

        found = train(precision, tuning, path / case)
    elif mode == "turns":
        from turn_ranks import train

        found = train(precision, tuning, path / case)
    elif mode == "sharded":
        from fsdp_ranks import train

        found = train(precision, tuning, path / case)
    else:
        from vllm_ranks import train

        found = train(mode, precision, tuning, path / case)
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available():
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile; gloo does as well
    if not torch.cuda.is_available():
        shard_on_cpu()
    for name in sys.argv[2:]:
        run(Path(sys.argv[1]), name)
    sys.stdout.flush()
    os._exit(0)  # engines and a process group: nobody knows in which order they end
