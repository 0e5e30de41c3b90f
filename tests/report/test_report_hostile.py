"""`trl-quant report` of files of any kind: it reads them right, or ends in one line that names the file."""

import errno
import html
import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hostile import FILES, METRICS, lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_tests import rest_is_long
from places import ROOT
from run_logs import entries, log, write_jsonl, write_state

from trl_quant.cli import main
from trl_quant.report.findings import findings, later_tokens_worse, not_a_number
from trl_quant.report.page import page
from trl_quant.report.panels import chart, logged
from trl_quant.report.runs import LARGEST, Group, Run, differences, grouped, moving_average, read_run
from trl_quant.report.table import row
from trl_quant.report.terminal import plain, printable
from trl_quant.storage.whole import write_whole


HUGE = 10**400
ODD = {
    "null": None,
    "text": "7",
    "list": [7],
    "object": {"a": 7},
    "true": True,
    "nan": math.nan,
    "inf": math.inf,
    "huge": HUGE,
    "half": 7.5,
    "negative": -7,
}


@pytest.fixture
def no_endless_wait():
    """A FIFO that is read would hold up all tests."""

    def stop(*signal):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def message(*argv) -> str:
    """The one line in which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, argv)])
    text = ended.value.code
    assert text.startswith("error: ") and "\n" not in text and text.removeprefix("error: ").isprintable()
    return text


# What is refused

REFUSED = {}  # case -> file, what it holds, what the message says
for kind, value in ODD.items():
    bad = {"step": value, "reward": 1.0}
    REFUSED |= {
        f"a line's step: {kind}": ("metrics.jsonl", lines(*entries(3), bad, *entries(5)), ", line 4: {"),
        f"the last line's step: {kind}": ("metrics.jsonl", lines(*entries(3), bad), ", line 4: {"),
        f"an entry's step: {kind}": (
            "trainer_state.json",
            json.dumps({"log_history": [*entries(3), bad]}),
            ", `log_history`[3]: {",
        ),
    }
    for name in ("max_steps", "global_step"):
        state = {"log_history": entries(3)} | {name: value}
        REFUSED[f"{name}: {kind}"] = ("trainer_state.json", json.dumps(state), f": `{name}`=")
    if kind != "object":
        state = json.dumps({"arguments": value})
        REFUSED[f"arguments: {kind}"] = ("checkpoint-3/rollout_state.json", state, "`arguments`=")
        REFUSED[f"settings: {kind}"] = ("settings.json", json.dumps(value), "not a JSON object")
    if kind != "list":
        state = json.dumps({"log_history": value})
        REFUSED[f"log_history: {kind}"] = ("trainer_state.json", state, "not a list of log entries")
DEEP = '{"step": 4, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
UTF16 = lines(*entries(3)).encode("utf-16")
REFUSED |= {
    "a step missing": ("trainer_state.json", '{"log_history": [{"reward": 1}]}', "`log_history`[0]"),
    "log_history missing": ("trainer_state.json", '{"global_step": 3}', "`log_history`=None"),
    "a state that is a list": ("trainer_state.json", "[1]", "holds [1], not a JSON object"),
    "a list of lists": ("trainer_state.json", '{"log_history": [[], 1]}', "`log_history`[0]: []"),
    "a line that is a number": ("metrics.jsonl", lines(*entries(3), "12", *entries(3)), "line 4: 12 is not a log"),
    "a last line that is a number": ("metrics.jsonl", lines(*entries(3), "12"), "line 4: 12 is not a log entry"),
    "an empty line": ("metrics.jsonl", lines(*entries(3), "", *entries(3)), "line 4: '' is not whole"),
    "a deep line": ("metrics.jsonl", lines(*entries(3), DEEP, *entries(3)), "line 4: "),
    "a deep last line": ("metrics.jsonl", lines(*entries(3), DEEP), "RecursionError"),
    "a deep state": ("trainer_state.json", DEEP, "RecursionError"),
    "deep settings": ("settings.json", DEEP, "RecursionError"),
    "settings of 60 levels": ("settings.json", '{"x":' + "[" * 60 + "1" + "]" * 60 + "}", "more than 50 levels"),
    "settings of 400 levels": ("settings.json", '{"x":' + "[" * 400 + "1" + "]" * 400 + "}", "more than 50 levels"),
    "5000 digits": ("metrics.jsonl", lines(*entries(3), '{"step": 4, "x": ' + "9" * 5000 + "}"), "4300 digits"),
    "a log that is no UTF-8": ("metrics.jsonl", b'{"step": 1, "x": "\xff"}\n', "can't decode byte"),
    "a state that is no UTF-8": ("trainer_state.json", b"\xfe\xfe", "can't decode byte"),
    "settings that are no UTF-8": ("settings.json", b'{"x": "\xff"}', "can't decode byte"),
    "a log in UTF-16": ("metrics.jsonl", UTF16, "can't decode byte"),
    "an empty state": ("trainer_state.json", "", "holds no run"),
    "half a state": ("trainer_state.json", '{"log_history": [', "trainer_state.json is not whole"),
    "half a state of a checkpoint": ("checkpoint-3/trainer_state.json", '{"log', "trainer_state.json is not whole"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_log_is_refused(tmp_path, case):
    name, content, says = REFUSED[case]
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    if path.name in ("settings.json", "rollout_state.json"):
        (tmp_path / "run" / "metrics.jsonl").write_text(lines(*entries(3)))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = message("report", tmp_path / "run", "--output", tmp_path / "report.html")
    assert says in text and str(path) in text and not (tmp_path / "report.html").exists()


IN_ITS_PLACE = {
    "a FIFO": (os.mkfifo, "not a regular file"),
    "a directory": (os.mkdir, "not a regular file"),
    "a device": (lambda path: os.symlink("/dev/zero", path), "not a regular file"),
    "a loop of links": (lambda path: os.symlink(path.name, path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", IN_ITS_PLACE)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(tmp_path, name, kind, no_endless_wait):
    make, says = IN_ITS_PLACE[kind]
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    if name != "metrics.jsonl":
        (run / "metrics.jsonl").write_text(lines(*entries(3)))
    make(run / name)
    text = message("report", run, "--output", tmp_path / "report.html")
    assert str(run / name) in text and says in text
    (run / name).rmdir() if kind == "a directory" else (run / name).unlink()
    (run / "metrics.jsonl").write_text(lines(*entries(3)))
    assert read_run(run).history == entries(3)


def test_a_run_that_is_no_directory(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "Too many levels of symbolic links" in message("report", tmp_path / "loop")
    (tmp_path / "log").write_text("x")
    assert "It is a file. Name its directory." in message("report", tmp_path / "log")
    (tmp_path / "empty").mkdir()
    assert "is a file" not in message("report", tmp_path / "empty")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read(tmp_path, name, monkeypatch):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text(lines(*entries(3)))
    (run / name).write_text("{}")
    (run / name).chmod(0)
    run.chmod(0o755)
    monkeypatch.chdir(run)
    user = os.geteuid()
    try:
        if user == 0:  # who may read everything
            os.seteuid(65534)
        with pytest.raises(ValueError, match=f"{name} cannot be read: Permission denied"):
            read_run(".")
    finally:
        os.seteuid(user)


def test_a_read_that_fails_names_its_file(tmp_path, monkeypatch):
    """As on a disk that breaks: the system's error names no file."""
    run = write_jsonl(tmp_path / "run", entries(3))

    def broken(self, *encoding):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_text", broken)
    assert f"{run / 'metrics.jsonl'} cannot be read: Input/output error" in message("report", run)


# What is read


def same(found: Run, history: list[dict]) -> None:
    assert found.history == history and all(type(entry["step"]) is int for entry in found.history)


def test_text_as_other_programs_write_it(tmp_path):
    run, rows = tmp_path / "run", entries(3)
    run.mkdir()
    for text in (
        "\ufeff" + lines(*rows),  # Windows
        lines(*rows).replace("\n", "\r\n"),
        lines(*rows) + "\n\n",
        lines(*rows).rstrip(),
        lines(*(entry | {"step": float(entry["step"])} for entry in rows)),
        lines(*rows, '{"step": 4, "rew'),
    ):
        (run / "metrics.jsonl").write_text(text)
        same(read_run(run), rows)
    # Which `str.splitlines` takes for ends of lines
    rows = [row | {"text": "a\u2028b\x85c"} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    same(read_run(run), rows)
    (run / "metrics.jsonl").write_text("")
    same(read_run(run), [])


def test_steps_out_of_order(tmp_path):
    """Sorted in a state, where each entry counts; in a log an earlier step says that the run was resumed there."""
    write_state(tmp_path / "state", entries(9)[::-1])
    same(read_run(tmp_path / "state"), entries(9))
    same(read_run(write_jsonl(tmp_path / "log", entries(9)[::-1])), entries(1))
    twice = [entry for entry in entries(9) for _ in range(2)]
    write_state(tmp_path / "twice", twice)
    run = read_run(tmp_path / "twice")
    same(run, twice)
    chart([run]).draw_without_rendering()


@given(
    st.lists(
        st.fixed_dictionaries({"step": st.integers(0, 9)}, optional={"reward": st.just(1.0), "eval_reward": st.just(2)})
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
def test_resumed_logs_are_read_as_one_would_by_hand(tmp_path, rows):
    rows = [row | {"line": i} for i, row in enumerate(rows)]
    kept, latest = [], -1
    for entry in rows:
        if "reward" in entry and entry["step"] <= latest:
            kept = [before for before in kept if before["step"] < entry["step"]]
        kept.append(entry)
        latest = entry["step"] if "reward" in entry else max(latest, entry["step"])
    (tmp_path / "metrics.jsonl").write_text(lines(*rows))
    assert read_run(tmp_path).history == sorted(kept, key=lambda row: row["step"])


@given(st.lists(st.floats(-LARGEST, LARGEST) | st.integers(-9, 9), max_size=60), st.integers(1, 70))
@settings(max_examples=300, deadline=None)
def test_moving_averages_have_the_bits_of_fmean(values, window):
    means = [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    assert moving_average(values, window) == means


@pytest.mark.long
def test_values_that_are_no_numbers(tmp_path):
    """Those of one metric are left out; what is too large is told."""
    good = entries(20)
    names = ["entropy", "grad_norm", "step_time", "num_tokens", "noise/sigma", "profiling/x", "train_runtime"]
    names += ["mismatch/by_position/0-15", "sync_check/bound", "sync_check/logp_difference", "eval_accuracy"]
    for kind, value in ODD.items():
        run = read_run(write_jsonl(tmp_path / kind, [row | dict.fromkeys(names, value) for row in good]))
        assert [run.values(name) for name in names] == [[value] * 20 if kind in ("half", "negative") else []] * 11
        assert run.values("reward") == [row["reward"] for row in good]
        found = not_a_number(run)
        if kind in ("nan", "inf"):
            assert found.startswith("entropy is not a finite number at step 1 (220 such values in all)")
        elif kind == "huge":
            assert found.startswith("entropy is beyond 1e+100 at step 1 (220 such values in all)")
        else:
            assert found is None
        assert row(run) and page([run])


@pytest.mark.long
def test_values_at_the_end_of_the_range(tmp_path):
    for value in (LARGEST, -LARGEST, 5e-324, 0.0):
        run = Run("x", log(**{name.replace("/", "__"): value for name in METRICS}))
        assert run.values("reward") == [value] * 40
        assert row(run) and not_a_number(run) is None
        chart([run]).draw_without_rendering()
    assert Run("x", log(reward=1.01e100)).values("reward") == []


BUCKETS = ["abc", "0-15-30", "-", "", "1e5-", "x-1", "9" * 4000 + "-", "-5-3", "٣-٤", " 1-2"]


def test_buckets_that_are_none():
    named = {f"mismatch__by_position__{name}": 1.0 for name in BUCKETS}
    real = {"mismatch__by_position__16-": 9e-3, "mismatch__by_position__0-15": 1e-3}
    run, clean = Run("x", log(**named, **real)), Run("x", log(**real))
    assert later_tokens_worse(run) == later_tokens_worse(clean) != None  # noqa: E711
    (panel,) = logged([Group("x", [run])])["Mismatch"]
    assert list(panel.metrics([run])) == ["0-15", "16-"]
    assert page([run]) == page([clean])
    assert logged([Group("x", [Run("x", log(**named))])]) == {}
    open_first = {"mismatch__by_position__0-": 1e-3, "mismatch__by_position__16-": 9e-3}
    assert later_tokens_worse(Run("x", log(**open_first))) is None


def test_settings_that_are_not_equal_to_themselves():
    def run(name, **found):
        return Run(name, entries(1), settings=found)

    groups = grouped([run("a", x=math.nan, y=1), run("b", x=math.nan, y=2)])
    assert differences(groups) == {"y": [1, 2]}


def test_one_run_twice_is_two_runs():
    sick = log(reward=0.5, loss=math.nan)
    (line,) = findings(Group("a", [Run("a", sick), Run("a", sick)]))
    assert line.endswith("(a; 2 of 2 runs)")


# Names

NAMES = ["run[seed0]", "[bold]x", "[b", r"$\frac{$", "a$b$c", "_hidden", ":boom:", "back\\slash", "{0}"]
NAMES += ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb", "a\rb", "\x9b31m", "\u202ebidi", "\udcff", "tab\tx", "\x7f"]
NAMES += ["<script>", "'DejaVu Sans'", '"><svg onload=x>', "#4124df", "&amp;", "-->", "日本"]


def test_plain():
    for text in ("[/]", "[bold]x[/bold]", ":boom:", "[link=http://x]y[/link]"):
        assert plain(text).plain == text and not plain(text).spans


def test_printable():
    assert [printable(name) for name in ("\x1b[1m", "a\nb", "\x9b", "\u202e", "\udcff", "日本 [é]")] == [
        r"\x1b[1m",
        r"a\nb",
        r"\x9b",
        r"\u202e",
        r"\udcff",
        "日本 [é]",
    ]


def test_names_are_shown_as_they_are(tmp_path, capsys, monkeypatch):
    """In the table and the findings, in the page and in the charts; nothing acts on a terminal."""
    monkeypatch.setenv("COLUMNS", "300")
    runs = [write_jsonl(tmp_path / "runs" / name, [*entries(6), {"step": 7, name: math.nan}]) for name in NAMES]
    for name in NAMES:
        (tmp_path / "runs" / name / "settings.json").write_text(json.dumps({name: name}))
    monkeypatch.chdir(tmp_path)
    main(["report", *map(str, runs), "--output", "[x].html", "--output", "c.svg", "--output", "c.png"])
    printed, text = capsys.readouterr().out, Path("[x].html").read_text()
    assert "report: [x].html" in printed
    assert ElementTree.parse("c.svg").getroot().tag.endswith("svg") and Path("c.png").stat().st_size
    for shown in (printed, text):
        assert all(character.isprintable() or character == "\n" for character in shown)
    for name in map(printable, NAMES):
        assert f"{name} " in printed and f"{name}: {name} is not a finite number at step 7" in printed
        assert text.count(html.escape(name)) > 6  # legend, findings, table of runs, settings' names and values
    legend = chart([read_run(run) for run in runs]).legends[0]
    assert [label.get_text() for label in legend.get_texts()] == [*map(printable, NAMES)]
    assert not any(label.get_parse_math() for label in legend.get_texts())


def test_names_in_errors_do_not_act_on_a_terminal(tmp_path):
    write_jsonl(tmp_path / "\x1b[31mred", ["x"])
    for argv in ([tmp_path], [tmp_path / "\x1b[31mred"]):
        assert r"\x1b[31mred" in message("report", *argv)  # no other than printable characters: see `message`


def test_seeds_in_brackets_are_seeds():
    runs = [Run(f"run[seed{i}]", entries(1), settings={"lr": 1, "seed": i}) for i in range(2)]
    assert [group.name for group in grouped(runs)] == ["run"]


# A full disk


@pytest.fixture
def full(monkeypatch):
    """Files may not grow beyond a few bytes, so that each write stops in its middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep truncated bytecode of what it imports

    def limit(nbytes: int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("suffix", rest_is_long(["html", "png", "svg", "pdf"], "html", "png"))
def test_nothing_half_written_is_left(tmp_path, suffix, full, capsys):
    run, target = write_jsonl(tmp_path / "run", entries(6)), tmp_path / "out" / f"report.{suffix}"
    target.parent.mkdir()
    target.write_bytes(b"before")
    full(5000)
    text = message("report", run, "--output", target)
    assert text == f"error: [Errno {errno.EFBIG}] File too large: {str(target)!r}"
    assert target.read_bytes() == b"before" and os.listdir(target.parent) == [target.name]
    full(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    main(["report", str(run), "--output", str(target)])
    assert target.stat().st_size > 5000 and os.listdir(target.parent) == [target.name]


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    """The message names the file that was asked for, not the temporary one that was written."""

    def no_space(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    target = tmp_path / "report.html"
    with pytest.raises(OSError, match="No space left on device") as error:
        write_whole(target, b"x")
    assert error.value.filename == str(target) and not os.listdir(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "closed"])
def test_output_that_cannot_be_printed(tmp_path, kind):
    run = write_jsonl(tmp_path / "run", entries(6))
    command = [sys.executable, "-m", "trl_quant.cli", "report", str(run), "--output", str(tmp_path / "r.html")]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as device:
        out = device if kind == "full" else writer
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    if kind == "full":  # rich is silent where a pipe is closed
        assert ended.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"


def test_a_report_loads_no_trainer(tmp_path):
    """It would take most of the command's time."""
    run = write_jsonl(tmp_path / "run", entries(6))
    code = (
        "import sys\nfrom trl_quant.cli import main\n"
        f"main(['report', {str(run)!r}, '--output', {str(tmp_path / 'r.html')!r}])\n"
        "assert not {'transformers.trainer', 'trl', 'vllm'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
