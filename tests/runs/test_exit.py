"""A limit ends the process too: at its end, threads and children that a call left behind do not keep it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS, ROOT
from tiny import save_tiny


# Runs each of the given programs in a fork of what has been imported, which goes on as an interpreter of its own does
FORKS = """
import json, os, runpy, sys
children = []
for name, code in json.loads(sys.argv[1]):
    sys.stdout.flush()
    children.append(os.fork())
    if children[-1] == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        break
else:
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(statuses))
    code = ""
exec(code)
"""


def ended(programs: list[tuple], imported: str, path: Path, *directories: Path) -> list[tuple[int, str]]:
    """The status of each program, given with its name, and what it printed. All run at once: they mostly wait."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *directories)))}
    command = [sys.executable, "-c", imported + FORKS, json.dumps(programs)]
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = [(path / f"{name}.txt").read_text() for name, _ in programs]
    return [*zip(json.loads(done.stdout), printed, strict=True)]


# `act` hangs in threads that Python waits for
PROGRAM = """
import asyncio, multiprocessing, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from trl_quant.rollout import limits
limits.GRACE, limits.REPEAT = 16.0, 0.2
message = "the call took too long".__str__

def within_a_pool():
    with ThreadPoolExecutor() as pool:
        list(pool.map(time.sleep, [90, 90]))

def in_a_pool_that_stays():
    ThreadPoolExecutor().submit(time.sleep, 90).result()

def to_thread():
    asyncio.run(asyncio.to_thread(time.sleep, 90))

def in_a_thread():
    threading.Thread(target=time.sleep, args=(90,)).start()
    time.sleep(90)

def in_a_process():
    with ProcessPoolExecutor() as pool:
        pool.submit(time.sleep, 90).result()

def in_a_child():
    child = multiprocessing.Process(target=time.sleep, args=(90,))
    child.start()
    child.join()

def idle():
    global kept
    kept = ThreadPoolExecutor()
    kept.submit(int).result()
    time.sleep(90)

def in_a_coroutine():
    async def call():
        await coroutines.finished_within(0.2, message, asyncio.to_thread(time.sleep, 90))
    coroutines = limits.CoroutineThread()
    asyncio.run(call())

def main():
    act() if act is in_a_coroutine else limits.called_within(0.2, message, act)
"""
ENDS = {  # how the main program ends -> its status
    "main()": 1,
    "try: main()\nexcept TimeoutError as error: sys.exit('error: ' + str(error))": 1,
    "try: main()\nexcept TimeoutError: time.sleep(17); print('goes on')": 0,  # longer than `GRACE`
    "try: main()\nexcept TimeoutError: sys.exit(5)": 5,
    "import code; sys.ps1 = '>>> '\ntry: main()\nexcept TimeoutError: time.sleep(17); print('goes on')": 0,
    "thread = threading.Thread(target=main)\nthread.start(); thread.join()": 0,
}
ACTS = (
    "within_a_pool",
    "in_a_pool_that_stays",
    "to_thread",
    "in_a_thread",
    "in_a_process",
    "in_a_child",
    "in_a_coroutine",
)
LEFT = "threads that a call left behind"


@pytest.mark.long
def test_a_process_ends_with_its_own_status(tmp_path):
    """Each hanging call with an error, and each end with one of them, in forks that end as interpreters do."""
    cases = [(act, "main()") for act in ACTS] + [("within_a_pool", end) for end in list(ENDS)[1:]]
    cases.append(("idle", "main()"))  # its thread ends when Python asks
    programs = [(number, f"act = {act}\n{end}") for number, (act, end) in enumerate(cases)]
    for (act, end), (status, text) in zip(cases, ended(programs, PROGRAM, tmp_path), strict=True):
        assert status == ENDS[end], (act, end, text)
        assert ("goes on" in text) == ("goes on" in end), text
        assert "the call took too long" in text or "except" in end, text
        waits = act not in ("in_a_child", "idle")  # a child is ended
        if act != "in_a_process":  # whose pool may have ended with its workers
            assert (LEFT in text) == waits, (act, end, text)


TRAINING = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from trl_quant.rollout import limits
limits.GRACE = 16.0
pool = ThreadPoolExecutor()

def judge(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 1 and int(__import__("os").environ.get("RANK", 0)) == 0:
        return list(pool.map(lambda text: time.sleep(120), completions))
    return [float(len(text) % 3) for text in completions]

async def judge_later(completions, trainer_state, **kwargs):
    return await __import__("asyncio").to_thread(judge, completions, trainer_state)
"""
IN_A_SCRIPT = """
import sys
from judges import judge
from training import config, dataset, make
from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
settings = {"rollout_precision": "int8", "reward_timeout": 1.0, "save_strategy": "steps", "save_steps": 1}
args = config(QuantGRPOConfig, sys.argv[2], **settings)
make(QuantGRPOTrainer, args, model=sys.argv[1], train_dataset=dataset(32), reward_funcs=judge).train()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_run_whose_judge_hangs(tmp_path):
    """In a script, on the command line, and on one of two ranks: all end, after the error and the last checkpoint."""
    save_tiny(tmp_path / "model", "qwen2")
    (tmp_path / "judges.py").write_text(TRAINING)
    (tmp_path / "script.py").write_text(IN_A_SCRIPT)
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{i}+1="}}\n' for i in range(32)))
    options = (
        "--model_name_or_path model --dataset_name data.jsonl --use_cpu --report_to none --max_steps 4 --bf16 false"
    )
    options += " --rollout_precision int8 --num_generations 4 --per_device_train_batch_size 8 --reward_timeout 1"
    options += " --max_completion_length 8 --save_strategy steps --save_steps 1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launcher = f"torch.distributed.run --nproc_per_node 2 --master_port {port} script.py model ranks"
    command = f"trl_quant.cli train {options} --output_dir command --reward_funcs judges.judge_later"
    programs = [
        ("script", "sys.argv[1:] = 'model', 'script'\nrunpy.run_path('script.py', run_name='__main__')"),
        *(
            (name, f"sys.argv = {words.split()}\nrunpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)")
            for name, words in (("ranks", launcher), ("command", command))
        ),
    ]
    imported = "import trl.trainer.grpo_trainer, trl_quant.trainers.grpo"
    for (name, _), (status, printed) in zip(
        programs, ended(programs, imported, tmp_path, HELPERS, tmp_path), strict=True
    ):
        assert status == 1, printed
        judge = "judge_later" if name == "command" else "judge"
        assert f"The reward function '{judge}', at step 1, did not return within" in printed, printed
        assert f"The last whole checkpoint is {name}/checkpoint-1" in printed and LEFT in printed, printed
