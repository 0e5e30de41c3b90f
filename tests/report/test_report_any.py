"""`trl-quant report` of any files and any logs: it reports or draws them, or refuses them with one line."""

import json
from pathlib import Path

import pytest
from hostile import FILES, lines, names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_quant.report.findings import findings, verdict
from trl_quant.report.page import page
from trl_quant.report.panels import chart
from trl_quant.report.runs import Run, grouped, read_run
from trl_quant.report.table import HEADER, row


pytestmark = pytest.mark.slow
numbers = st.floats() | st.floats(-2, 2) | st.integers(-(10**320), 10**320) | st.integers(0, 2)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
# Of a kind, so that most of a log is read
good_entry = st.builds(
    lambda step, values: {**values, "step": step}, st.integers(0, 30), st.dictionaries(names, numbers, max_size=9)
)
odd_entry = st.builds(lambda step, values: values | step, st.just({}) | anything.map(lambda x: {"step": x}), good_entry)
good_log = st.lists(good_entry, max_size=25)
odd_log = st.lists(good_entry | odd_entry | anything, max_size=9)
states = st.fixed_dictionaries(
    {"log_history": good_log | odd_log | anything},
    optional={"max_steps": st.integers(0, 30) | anything, "global_step": st.integers(0, 30) | anything},
)
documents = st.builds(json.dumps, states | anything).map(str.encode)
logs = st.builds(lambda rows: lines(*rows), good_log | odd_log).map(str.encode)
contents = st.one_of(logs, documents, st.binary(max_size=30), st.builds(lambda x, n: x[:n], logs, st.integers(0, 200)))
SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
}


def reported(path: Path, files: dict[str, bytes]) -> Run | None:
    """The run that files hold, once it is judged; `None` where they are refused by the name of one of them."""
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    (path / "checkpoint-7").mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    try:
        run = read_run(path)
    except ValueError as error:
        assert "holds no run" in str(error) or any(str(path / name) in str(error) for name in files)
        return None
    (group,) = grouped([run])
    assert findings(group) or verdict(group)
    assert len(row(run)) == len(HEADER)
    return run


@given(st.dictionaries(st.sampled_from(FILES), contents, min_size=1))
@settings(max_examples=200, **SETTINGS)
def test_any_files_are_reported_or_refused(tmp_path, files):
    reported(tmp_path, files)


@given(states)
@settings(max_examples=200, **SETTINGS)
def test_any_state_is_reported_or_refused(tmp_path, state):
    reported(tmp_path, {"trainer_state.json": json.dumps(state).encode()})


@pytest.mark.filterwarnings("ignore")  # of glyphs that a font lacks, and axes without room
@given(good_log)
@settings(max_examples=5, **SETTINGS)
def test_any_log_is_drawn(tmp_path, rows):
    run = reported(tmp_path, {"trainer_state.json": json.dumps({"log_history": rows}).encode()})
    chart([run]).draw_without_rendering()
    assert page([run]).endswith("</html>\n")
