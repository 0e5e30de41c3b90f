"""What happens in a notebook: trainers with vLLM one after another in one process, under one name or deleted between.

The second one finds a standard output that is no file, as in a notebook, and the last one none.

    python tests/helpers/three_trainers.py DIRECTORY rebound|deleted

prints as JSON, on its last line, what each trainer did.
"""

import gc
import io
import json
import os
import sys
import weakref
from pathlib import Path

import garbage
import torch
from tiny import save_tiny
from training import metrics, trainer_for
from vllm_engines import SMALL

from trl_quant import QuantGRPOTrainer


# A precision, and where it fails
TRAINERS = [("int8", None), ("bf16", None), ("int8", "training"), ("int8", "start"), ("int8", None)]


def trainer_of(path: Path, precision: str, fails: str | None) -> QuantGRPOTrainer:
    def reward(completions, **kwargs):
        if fails == "training":
            raise RuntimeError("no reward")
        return [float(sum(map(ord, text)) % 11) for text in completions]

    engine = SMALL | {"kv_cache_memory_bytes": 1 if fails == "start" else 16 << 20}
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": engine, "vllm_max_model_length": 512}
    settings |= {"rollout_precision": precision, "max_steps": 2}
    return trainer_for(path / "out", str(path / "model"), reward_funcs=reward, **settings)


if __name__ == "__main__":
    garbage.search_all_there_is()
    path, deleted, done = Path(sys.argv[1]), sys.argv[2] == "deleted", []
    save_tiny(path / "model", dtype=torch.bfloat16)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    output = sys.stdout
    outputs = (output, io.StringIO(), output, output, None)
    for (precision, fails), sys.stdout in zip(TRAINERS, outputs, strict=True):
        models = []
        try:
            trainer = trainer_of(path, precision, fails)
            trainer.vllm_generation.llm.apply_model(lambda model, models=models: models.append(weakref.ref(model)))
            trainer.train()
            found = {"log": metrics(trainer)[:2], "wrapped": type(trainer.model_wrapped).__name__}
        except (RuntimeError, ValueError) as error:
            found = {"error": str(error)}
        if deleted:
            trainer = None
        gc.collect()
        found["left"] = sum(model() is not None for model in models)
        found["ranks"] = [name for name in names if name in os.environ]
        done.append(found)
    sys.stdout = output
    print("\n" + json.dumps(done))
