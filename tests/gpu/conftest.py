"""
Each test of a vLLM engine runs in a process of its own.

vLLM gives an engine's memory back only when its process ends, its sleep mode takes one engine in the life of a process,
and some of its settings are read once. The processes are forks of one that has imported vLLM and not touched the GPU
([`warm`]), so they start at once, and `make test-gpu` runs several beside each other on one card.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import warm


REPORTS = "FILE_OF_TEST_REPORTS"  # environment variable: where the process of one test writes its reports
# Errors that a test beside this one causes, after which this one runs again. vLLM compares the card's free memory
# before and after it falls asleep, and the other test may have taken some. `accelerate launch` gets a port that was
# free when the test began, and the other test may have taken it.
DISTURBED = ("Memory usage increased after sleeping", "EADDRINUSE")
ATTEMPTS = 3


class Reports:
    """Writes the reports of a test to a file, for the process that asked for the test."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config):
    if REPORTS in os.environ:
        config.pluginmanager.register(Reports(config))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if REPORTS in os.environ or not all(map(item.get_closest_marker, ("gpu", "vllm"))):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for _ in range(ATTEMPTS):
        reports = reports_of_own_process(item)
        errors = [str(report.longrepr) for report in reports if report.failed]
        if not any(sign in error for error in errors for sign in DISTURBED):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one left what they share; the next may be in another directory
    item.session._setupstate.teardown_exact(nextitem)
    return True


def reports_of_own_process(item) -> list[pytest.TestReport]:
    """Runs one test in a new process and returns its reports; a failure if the process ends before the test does."""
    config, capture = item.config, item.config.getoption("capture")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "reports")
        options = ["-q", "-p", "no:cacheprovider", f"--capture={capture}", f"--basetemp={temporary}/files"]
        command = [sys.executable, "-m", "pytest", *options, item.nodeid]
        done = warm.run(command, env=environment | {REPORTS: str(file)}, capture_output=True)
        written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if capture == "no":
        print(done.stdout)
    reports = [config.hook.pytest_report_from_serializable(config=config, data=data) for data in written]
    for report in reports:
        if report.skipped:
            report.longrepr = tuple(report.longrepr)  # JSON has lists alone
    if not any(report.when == "teardown" for report in reports):
        ended = f"The process of this test ended with code {done.returncode}.\n"
        ended += done.stdout[-4000:] + done.stderr[-4000:]
        reports.append(pytest.TestReport(item.nodeid, item.location, {}, "failed", ended, "call"))
    return reports
