"""Ranks that take unequal numbers of turns: with the embedded engine, or with vLLM that sleeps between generations."""

import faulthandler
import os
from pathlib import Path


PATIENCE = 420  # seconds until ranks that wait for each other are ended
GENERATIONS = 3
# What vLLM does once a generation, whatever the number of turns, in any order
ONCE = {"sync": 1, "wake weights": 1, "wake kv_cache": 1, "check": 1, "sleep": 1}


def note_sleep(llm, events: list[str]) -> None:
    """Notes when vLLM, which has a sleep mode here, falls asleep and is woken."""
    sleep, wake_up = llm.sleep, llm.wake_up

    def sleeping(level: int):
        events.append("sleep")
        sleep(level=level)

    def waking(tags: list[str]):
        events.extend(f"wake {tag}" for tag in tags)
        wake_up(tags=tags)

    llm.sleep, llm.wake_up = sleeping, waking


def train(precision: str, engine: str, path: Path) -> dict:
    """
    One rank of two, with one turn or three. `engine` is "embedded" or vLLM's level of sleep: asleep between
    generations, it has a self-check in each. On CPUs, where vLLM has no sleep mode, a stand-in sleeps.
    """
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    from training import parameters
    from turns import in_vllm, noted, put_to_sleep, with_tools

    from trl_quant.rollout.verify import self_check

    level = 0 if engine == "embedded" else int(engine)
    settings = {"is_correction": "tis", "num_iterations": 2, "max_steps": 2 * GENERATIONS}
    if level:
        from vllm_engines import GPU, SLEEPING, keep

        settings |= in_vllm() | {"vllm_gpu_memory_utilization": 0.1}
        if GPU:
            settings |= {"bf16": True, "use_cpu": False, "vllm_engine_kwargs": SLEEPING}
            settings |= {"vllm_enable_sleep_mode": True, "vllm_sleep_level": level}
    trainer = with_tools(path, str(path.parent / "model"), 3, rollout_precision=precision, **settings)
    trainer.max_tool_calling_iterations = (0, 2)[int(os.environ["RANK"])]  # as completions that call no tool would do
    events, _ = noted(trainer.vllm_generation)
    check, correct, batches = self_check.self_check, trainer.correct, []
    self_check.self_check = lambda *args: events.append("check") or check(*args)
    trainer.correct = lambda batch: correct(batch) or batches.append(dict(batch))
    if level:
        keep(trainer)
        if GPU:
            note_sleep(trainer.vllm_generation.llm, events)
        else:
            put_to_sleep(trainer.vllm_generation.engine, level, events)
    trainer.train()

    logs = [log for log in trainer.state.log_history if "tools/call_frequency" in log]
    found = {
        "events": list(events),
        "weights": {name: value.double().sum().item() for name, value in parameters(trainer).items()},
        "calls": [log["tools/call_frequency"] for log in logs],
        **weights_of_tokens(batches),
    }
    if level:
        found |= compared(trainer, precision, path)
    faulthandler.cancel_dump_traceback_later()
    return found


def weights_of_tokens(batches: list[dict]) -> dict[str, list[float]]:
    """The correction's weights, each once: of the tokens of tools, and of the policy's own."""
    of_tools, own = set(), set()
    for batch in batches:
        weights, tools = batch["importance_sampling_ratio"], batch["tool_mask"] == 0
        written = batch["completion_mask"] == 1
        of_tools.update(weights[written & tools].tolist())
        own.update(weights[written & ~tools].tolist())
    return {"tool_weights": sorted(of_tools), "own_weights": sorted(own)}


def compared(trainer, precision: str, path: Path) -> dict[str, bool]:
    """Whether the engine ends as vLLM starts it on the trained weights, and whether that is as on the first ones."""
    from transformers import AutoModelForCausalLM
    from vllm_engines import fresh, greedy

    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.check_sync()  # the engine's own, after which it stays awake
    ours, options = greedy(trainer.vllm_generation.llm), {"distributed_executor_backend": "external_launcher"}
    last = greedy(fresh(trainer.model, precision, path / "last", **options))
    untrained = AutoModelForCausalLM.from_pretrained(path.parent / "model", dtype=trainer.model.dtype)
    first = greedy(fresh(untrained, precision, path / "first", **options))
    return {"equals_trained": ours == last, "equals_untrained": ours == first}


def assert_finished(one: dict, three: dict, asleep: bool) -> None:
    """No rank waited for the other: each did once a generation what is done once, and they trained together."""
    from turns import generations

    for found, turns in ((one, 1), (three, 3)):
        if asleep:
            cut = generations(found["events"], "sleep")
            counts = [{event: events.count(event) for event in events} for events in cut]
            assert counts == [ONCE | {"turn": turns}] * GENERATIONS
            assert found["equals_trained"] and not found["equals_untrained"]
        else:
            assert found["events"] == ["sync", *["turn"] * turns] * GENERATIONS
        assert len(found["own_weights"]) > 10
    assert one["weights"] == three["weights"]
    assert one["calls"] == three["calls"] == [1] * GENERATIONS  # a completion, on average: none and two
    assert one["tool_weights"] == [] and three["tool_weights"] == [1]
