"""vLLM's start says that it goes on, and nothing where it is fast."""

import threading
import time

from trl_quant.rollout.vllm.progress import starting


def test_a_slow_start_is_told_until_it_ends(capsys):
    threads = threading.active_count()
    with starting("Leave it out.", seconds=0.02):
        time.sleep(0.2)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "vLLM has been starting for 0 s. Leave it out." and second == "vLLM has been starting for 0 s."
    time.sleep(0.1)
    assert not capsys.readouterr().err and threading.active_count() == threads


def test_a_fast_start_is_not_told_and_an_error_passes(capsys):
    try:
        with starting("Leave it out."):
            raise RuntimeError("it failed")
    except RuntimeError as error:
        assert str(error) == "it failed"
    assert capsys.readouterr().err == ""
