"""A sync under vLLM's default torch.compile, in a process of its own: the other tests switch the compiler off."""

import os
import sys
from pathlib import Path

import pytest
import warm
from places import ROOT


pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_engine_ends_as_a_fresh_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = warm.run(command, env=environment, capture_output=True)
    assert done.returncode == 0 and "same" in done.stdout, (done.stdout + done.stderr)[-3000:]


def compiled(path: Path) -> None:
    import torch
    from vllm_engines import SMALL, engine, fresh, greedy, policy, update

    torch._dynamo.config.disable = False
    options = {**SMALL, "enforce_eager": False}
    model = policy(path / "model", tied=True, num_hidden_layers=1)
    sampler = engine(model, "int8", engine_kwargs=options)
    assert sampler.llm.llm_engine.vllm_config.compilation_config.mode > 0
    before = greedy(sampler.llm)
    for seed in range(2):
        update(model, seed)
        sampler.sync()
    sampler.check_sync()
    ours, theirs = greedy(sampler.llm), greedy(fresh(model, "int8", path / "fresh", enforce_eager=False))
    print("same" if ours == theirs != before else f"{ours} {theirs}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    compiled(Path(sys.argv[1]))
