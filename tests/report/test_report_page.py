"""The report's pictures and its page: what is drawn of which logs, in colours that all can tell apart."""

import io
import math
import re
from collections import Counter
from html.parser import HTMLParser
from statistics import fmean

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure
from matplotlib.text import Text
from run_logs import climbing, entries, log, noisy

from trl_quant.report.output import plot
from trl_quant.report.page import page
from trl_quant.report.panels import COLORS, POINTS, TOPICS, chart, draw, logged
from trl_quant.report.runs import Group, Run, grouped, moving_average


WEIGHT = "sampling/importance_sampling_ratio"


# Panels


def axis_of(title: str, *groups: Group):
    (panel,) = [panel for panels in TOPICS.values() for panel in panels if panel.title == title]
    axis = Figure().subplots()
    draw(axis, panel, groups)
    return axis


def test_a_panel_is_there_where_its_metrics_are():
    groups = [Group("a", [Run("a", log(reward=0.5))]), Group("b", [Run("b", log(ais__alpha=0.5, entropy=math.nan))])]
    assert {topic: [p.title for p in panels] for topic, panels in logged(groups).items()} == {
        "Learning": ["Reward"],
        "Correction": ["AIS's alpha and its parts"],
    }
    assert logged([Group("none", [Run("none", [])])]) == {}


def test_a_band_is_drawn_of_seeds_and_raw_values_of_a_single_run():
    runs = [Run("a0", entries(6)), Run("a1", entries(6, offset=0.5))]
    axis = axis_of("Reward", Group("a", runs), Group("b", [Run("b", entries(4, offset=2.0))]))
    lines = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
    single = moving_average([2.0, 2.1, 2.2, 2.3])
    assert list(lines["b"].get_ydata()) == single
    assert any(list(line.get_ydata()) == pytest.approx([2.0, 2.1, 2.2, 2.3]) for line in axis.lines)
    assert list(lines["a"].get_ydata()) == pytest.approx([0.25 + x for x in moving_average([i / 10 for i in range(6)])])
    (band,) = axis.collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert (ends.min(), ends.max()) == pytest.approx((0.0, 0.75))
    assert lines["a"].get_color() != lines["b"].get_color() and lines["a"].get_marker() != lines["b"].get_marker()


def test_averages_of_long_runs_are_drawn_at_fewer_steps():
    """The last one included; single values, which jump, are all drawn."""
    run = Run("a", entries(1001))
    drawn, raw = sorted(axis_of("Reward", Group("a", [run])).lines, key=lambda line: len(line.get_xdata()))
    averages = dict(zip(*run.series("reward"), strict=True))
    averages = dict(zip(averages, moving_average(list(averages.values())), strict=True))
    assert list(raw.get_ydata()) == run.values("reward")
    assert 100 < len(drawn.get_xdata()) <= POINTS and drawn.get_xdata()[-1] == max(averages)
    assert list(drawn.get_ydata()) == [averages[step] for step in drawn.get_xdata()]


def test_metrics_of_a_panel_differ_in_their_lines():
    axis = axis_of("Entropy", Group("a", [Run("a", log(entropy=1.0, mismatch__entropy=2.0))]))
    drawn = {line.get_ydata()[0]: line.get_linestyle() for line in axis.lines}
    legend = {
        text.get_text(): line.get_linestyle()
        for text, line in zip(axis.get_legend().texts, axis.get_legend().legend_handles)
    }
    assert legend == {"trainer": drawn[1.0], "sampler": drawn[2.0]} and drawn[1.0] != drawn[2.0]
    assert axis_of("Reward", Group("a", [Run("a", entries(4))])).get_legend() is None


def drawn(axis) -> dict[str, float]:
    """Name in the legend -> first value of the line that looks like it. All lines must look different."""
    keys = axis.get_legend().legend_handles
    for name, lines in (("line", axis.lines), ("key", keys)):
        for i, line in enumerate(lines):
            line.set_gid(f"{name}-{i}")
    file = io.StringIO()
    axis.figure.savefig(file, format="svg")
    found = re.findall(r'<g id="(line|key)-(\d+)">\s*<path [^>]*style="([^"]*)"', file.getvalue())
    dashes = {(name, int(i)): re.findall("stroke-dasharray: [^;]*", style) for name, i, style in found}
    of_lines = {str(dashes["line", i]): line.get_ydata()[0] for i, line in enumerate(axis.lines)}
    assert len(of_lines) == len(axis.lines) == len(keys)
    return {text.get_text(): of_lines[str(dashes["key", i])] for i, text in enumerate(axis.get_legend().texts)}


def test_each_age_has_a_line_in_the_order_of_ages(tmp_path):
    """A run is young at first, so its oldest tokens come last, and not in the order of their ages."""
    ages = {"0": 1.0, "9-": 6.0, "3-4": 4.0, "5-8": 5.0, "2": 3.0, "1": 2.0}
    run = Run("a", log(**{f"mismatch__by_age__{age}": kl for age, kl in ages.items()}))
    axis = axis_of("Mismatch by age", Group("a", [run]))
    assert list(drawn(axis).items()) == sorted(ages.items(), key=lambda item: item[1])
    (axis,) = chart([run]).axes
    axis.figure.draw_without_rendering()
    (title,) = [text for text in axis.get_children() if isinstance(text, Text) and text.get_text() == "Mismatch by age"]
    assert title.get_window_extent().y0 > axis.get_legend().get_window_extent().y1  # of two rows
    odd = log(**{f"mismatch__by_age__{name}": 1.0 for name in ("_hidden", r"$\frac$", "\x1b", *range(9))})
    axis = axis_of("Mismatch by age", Group("odd", [Run("odd", odd)]))
    axis.figure.draw_without_rendering()
    names = [text.get_text() for text in axis.get_legend().texts]
    assert names == ["_hidden", r"$\frac$", r"\x1b", *map(str, range(9))] and len(axis.lines) == 12


def test_each_evaluation_dataset_has_a_line():
    rows = log(4, reward=0.5)
    for step in (2, 4):
        for i, dataset in enumerate(("easy", "$hard")):
            rows.append({"step": step, f"eval_{dataset}_loss": 0.0, f"eval_{dataset}_runtime": 1.0, "eval_reward": i})
    axis = axis_of("Held-out reward", Group("a", [Run("a", rows)]))
    assert drawn(axis) == {"reward, easy": 0, "reward, $hard": 1} and not axis.collections  # no band
    one = Run("one", [row for row in rows if "eval_easy_loss" in row])
    axis = axis_of("Held-out reward", Group("one", [one]))
    assert len(axis.lines) == 1 and axis.get_legend() is None


def test_a_scale_is_logarithmic_where_values_are_far_apart():
    near, far = ([Run("x", log(mismatch__kl_k3=climbing(1e-3, end)))] for end in (5e-3, 5e-2))
    assert axis_of("Mismatch KL", Group("near", near)).get_yscale() == "linear"
    axis = axis_of("Mismatch KL", Group("far", far))
    assert axis.get_yscale() == "log" and axis.yaxis.get_major_formatter()(0.005) == "0.005"
    signed = [Run("x", log(mismatch__kl_k1=noisy(climbing(0, 1), 0.5)))]
    assert min(axis_of("Mismatch KL", Group("k1", signed)).lines[0].get_ydata()) >= 0  # by their size


def test_positions_are_in_order_at_the_start_and_at_the_end():
    logs = log(
        **{
            "mismatch__by_position__1024-": 3.0,
            "mismatch__by_position__0-15": lambda i: float(i),
            "mismatch__by_position__16-63": 2.0,
        }
    )
    full = Group("full precision", [Run("b", log(reward=1.0))])  # which has none, and no line
    axis = axis_of("Mismatch by position", Group("a", [Run("a", logs)]), full)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0-15", "16-63", "1024-…"]
    values = {line.get_linestyle(): list(line.get_ydata()) for line in axis.lines}
    assert values == {"--": [3.0, 2.0, 3.0], "-": [38.0, 2.0, 3.0]}
    assert {line.get_label() for line in axis.lines} == {"a"}


def test_bars_are_means_in_their_unit():
    runs = [Run(str(i), [{"step": 9, "train_mem_gpu_alloc_delta": gib * 2**30}]) for i, gib in enumerate((2, 4))]
    axis = axis_of("Memory", Group("a", runs), Group("b", runs[:1]))
    assert [bar.get_width() for bar in axis.patches] == [3.0, 2.0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["GPU"]


def test_chart_has_every_panel(tmp_path):
    runs = [Run("a", entries(4)), Run("b", entries(6, offset=0.5)), Run("full", [{"step": 1, "reward": 1.0}])]
    figure = chart(runs)
    assert [axis.get_title("left") for axis in figure.axes] == ["Reward", "Mismatch KL", "Weight of a token"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", "full"]
    assert [axis.get_title("left") for axis in chart(runs, titles=["Mismatch KL"]).axes] == ["Mismatch KL"]
    plot(runs, tmp_path / "new/chart.png")
    assert image.imread(tmp_path / "new/chart.png").std() > 0.01
    chart([Run("empty", [])])  # a run that has just begun


# Colours


def linear(color: str) -> np.ndarray:
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2."""
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) + 0.05 for color in (a, b))
    return high / low


# Machado et al. 2009, severity 1, on linear RGB
VISIONS = {
    "usual": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colors: list[str], vision: str) -> float:
    """The smallest distance in CIELAB between two colours."""
    seen = [lab(VISIONS[vision] @ linear(color)) for color in colors]
    return min(float(np.linalg.norm(a - b)) for i, a in enumerate(seen) for b in seen[:i])


def test_colours_stand_out_and_apart():
    text = page([Run("a", entries(4))])
    for i in (0, 1):
        papers = [re.findall(rf"--{name}: (#\w+)", text)[i] for name in ("paper", "card")]
        colors = {name: pair[i] for name, pair in COLORS.items()}
        series = [color for name, color in colors.items() if name.startswith("--s")]
        for paper in papers:
            assert all(contrast(colors[name], paper) >= 4.5 for name in ("--ink", "--muted"))
            assert all(contrast(color, paper) >= 3 for color in series)
        assert all(closest(series, vision) > 25 for vision in VISIONS)
    assert contrast("#0000ff", "#ffffff") == pytest.approx(8.59, abs=0.01)  # a published example
    assert closest(["#d00000", "#4d6b00"], "protan") < 0.5 * closest(["#d00000", "#4d6b00"], "usual")


# The page


class Reader(HTMLParser):
    """Tags that are open, attributes of all, and the text outside of style."""

    VOID = ("meta", "path", "use", "rect", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""

    def all(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two seeds of a run that fails, and one of another setting, whose name is no HTML."""
    settings = [{"is_correction": "none", "seed": 0}, {"is_correction": "none", "seed": 1}, {"is_correction": "ais"}]
    sick = log(reward=climbing(0.8, 0.1), mismatch__kl_k3=climbing(1e-3, 1e-1), entropy=1.0)
    seen = {"mismatch__weight_mean": 1.0, "mismatch__ess_ratio": 1.0, "mismatch__max_weight": 1.1}
    seen |= {"mismatch__unscored_fraction": 0.0, "frac_reward_zero_std": 0.1, "completions__clipped_ratio": 0.0}
    well = log(reward=climbing(0.1, 0.8), mismatch__kl_k3=1e-3, entropy=1.0, ais__alpha=0.5, **seen)
    rows = zip(("none-0", "none-1", "<b>ais</b>"), (sick, sick, well), settings, strict=True)
    return [Run(name, history, settings=found) for name, history, found in rows]


@pytest.fixture(scope="module")
def text(runs) -> str:
    return page(runs)


def test_the_page_is_whole_and_loads_nothing(text):
    reader = Reader(text)
    assert reader.open == []
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in reader.tags}
    links = [value for name in ("src", "href", "xlink:href") for value in reader.all(name)]
    assert links and all(link.startswith("#") for link in links)
    assert "http" not in text and "@import" not in text
    ids = Counter(reader.all("id"))
    referred = {link[1:] for link in links} | set(re.findall(r"url\(#(.*?)\)", text))
    assert referred <= set(ids) and max(ids.values()) == 1


def test_the_page_says_what_it_shows(text):
    reader = Reader(text)
    assert "3 runs of 2 settings" in reader.text
    assert "The mismatch KL grew 78 times" in reader.text and "All well." in reader.text
    assert "<b>ais</b>" in reader.text  # as text
    assert "is_correction" in reader.text and "seed" not in re.findall(r"<th scope=row>(.*?)</th>", text)
    assert all(title in reader.text for title in ("Reward", "Mismatch KL", "AIS's alpha and its parts"))
    assert "Noise on the norms" not in reader.text and "Noise and weights" not in reader.text


def test_every_picture_is_told_in_words(text):
    reader = Reader(text)
    ids = set(reader.all("id"))
    pictures = [attributes for tag, attributes in reader.tags if tag == "svg"]
    for attributes in pictures:
        assert attributes.get("aria-hidden") == "true" or (
            attributes["role"] == "img" and set(attributes["aria-labelledby"].split()) <= ids
        )
    # 39 / 40 of the way up, over ten steps: the mean of steps 31 to 40
    last = fmean(0.1 + 0.7 * (i - 20) / 20 for i in range(31, 41))
    assert f"&lt;b&gt;ais&lt;/b&gt;, reward: 0.1 to {last:.2g}." in text


def test_pictures_take_the_colours_of_the_page(text):
    body = text.partition("</style>")[2]
    used = set(re.findall(r"var\((--\w+)\)", body))
    assert used <= set(COLORS) and {"--ink", "--muted", "--grid", "--s0", "--s1"} <= used and "--s2" not in used
    fixed = set(re.findall(r"(?:fill|stroke|color): ?(#\w+)", body))
    assert not fixed, fixed
    assert not re.findall(r"<text(?![^>]*fill)[^>]*>", body)  # black by default


def test_labels_of_an_axis_keep_their_digits(runs, text):
    """The KL goes from 1e-3 to 1e-1 on a logarithmic axis; paths are short, and labels are not cut."""
    axis = axis_of("Mismatch KL", *grouped(runs))
    axis.figure.draw_without_rendering()
    labels = [tick.get_text() for tick in axis.get_yticklabels() if 1e-3 <= float(tick.get_text()) <= 1e-1]
    assert labels == ["0.001", "0.002", "0.005", "0.01", "0.02", "0.05", "0.1"]
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert set(labels) <= {label.strip() for label in shown}
    assert not re.findall(r' d="[^"]*\.\d\d', text)


def test_steps_are_whole_numbers():
    axis = axis_of("Reward", Group("a", [Run("a", log(reward=0.5)[:3])]))
    assert all(step == int(step) for step in axis.get_xticks())


def test_names_make_no_tags():
    """Of runs, metrics and settings: the page has the tags that it has with tame names, and their text."""

    def read(*names: str) -> Reader:
        runs = []
        for name in names:
            found = {f"profiling__{part}.{name}": i + 1.0 for i, part in enumerate("ab")}
            runs.append(Run(name, log(reward=0.5, **found), settings={"name": name, name: name}))
        return Reader(page(runs))

    hostile = ("$\\frac{$", "'DejaVu Sans'", "#4124df", "<b>x", '"><svg onload=x>', "&lt;i&gt;", "--><!--", "a\nb\x1b")
    reader, tame = read(*hostile), read(*(f"name{i}" for i in range(len(hostile))))
    assert reader.open == []
    drawn = ("g", "path", "text", "use")  # an axis has fewer numbers beside wide labels
    tags, expected = (Counter(tag for tag, _ in found.tags if tag not in drawn) for found in (reader, tame))
    assert tags == expected and {tag for tag, _ in reader.tags} == {tag for tag, _ in tame.tags}
    for i, name in enumerate(hostile):
        shown = name.replace("\n", "\\n").replace("\x1b", "\\x1b")
        assert reader.text.count(shown) == tame.text.count(f"name{i}") > 6, name  # findings, table, legend, axis ...


def test_the_same_runs_give_the_same_page(runs, text):
    assert page(runs) == text


def test_a_page_of_a_run_that_has_just_begun():
    reader = Reader(page([Run("new", [])]))
    assert "Too little to judge" in reader.text and "at step 0" in reader.text
    assert [tag for tag, _ in reader.tags].count("figure") == 0
