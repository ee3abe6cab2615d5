"""One color for one run, colors that everybody can tell apart, axes, saves, and sizes compared."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.records.experiment import Experiment
from orchestrator.views.report import charts, page, scaling, story
from tests.views.report.stories import experiment, sample_machines, train_again

LINES = 8
LEAST_DISTANCE = 10.0  # CIE76: what two neighbours in a legend need at the least
# How light reaches an eye that lacks one kind of cone (Machado, Oliveira and Fernandes, 2009).
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def schemes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", page.read("page.css"), re.DOTALL)
    named = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]
    return dict(zip(("light", "dark"), named, strict=True))


def linear(color: str) -> list[float]:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(color: str, eye: str) -> tuple[float, float, float]:
    light = linear(color)
    seen = [
        min(1.0, max(0.0, sum(part * share for part, share in zip(light, row, strict=True))))
        for row in EYES[eye]
    ]
    red, green, blue = seen
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def contrast(one: str, other: str) -> float:
    weights = (0.2126, 0.7152, 0.0722)
    light = sorted(
        sum(part * weight for part, weight in zip(linear(color), weights, strict=True))
        for color in (one, other)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_tells_the_lines_apart(scheme: str) -> None:
    colors = schemes()[scheme]
    lines = [colors[f"line-{number}"] for number in range(LINES)]
    assert all(contrast(line, colors["panel"]) >= 2.95 for line in lines)
    words = itertools.product(("ink", "soft", "good", "bad", "warn"), ("paper", "panel"))
    assert all(contrast(colors[word], colors[on]) >= 4.5 for word, on in words)  # WCAG, AA
    for eye in EYES:
        for one, other in [*itertools.combinations(lines, 2), (colors["good"], colors["bad"])]:
            distance = sum(
                (a - b) ** 2 for a, b in zip(lab(one, eye), lab(other, eye), strict=True)
            )
            assert distance**0.5 >= LEAST_DISTANCE, (eye, one, other)


def test_a_run_has_one_color_in_all_charts_and_a_metric_one_dash(tmp_path: Path) -> None:
    both = [experiment(tmp_path / name, steps=20) for name in ("one", "two")]
    train_again(both[0])  # a second Trainer is a run of its own
    for made in both:
        sample_machines(made)
    add(both[1], step=20, eval_loss=0.5)
    told = [story.read_story(made, 1) for made in both]
    found = charts.charts(told)
    of_a_run = {
        (line.run, line.color) for chart in found if not chart.stacked for line in chart.lines
    }
    assert of_a_run == {(0, 0), (1, 1), (2, 2)}
    loss = next(chart for chart in found if chart.title == "Loss")
    assert [(line.name, line.color, line.dash) for line in loss.lines] == [
        ("one Trainer 1 training", 0, 0), ("one Trainer 2 training", 1, 0),
        ("two training", 2, 0), ("two held out", 2, 1),
    ]  # fmt: skip
    # A curve of machines is of an experiment, and has the color of its first run.
    assert {line.color for chart in charts.of_machines(told) for line in chart.lines} == {0, 2}


def test_from_the_fifth_line_on_dashes_help(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0, ranks=4)
    sample_machines(made, nodes=6)
    lines = charts.of_machines([story.read_story(made)])[0].lines
    assert [(line.color, line.dash) for line in lines] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1),
    ]  # fmt: skip


def test_steps_have_a_time_and_an_epoch(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=40)
    path = made.path / "outputs" / "rank_00_metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({**each, "epoch": (each["step"] - 1) // 16}) + "\n" for each in lines)
    )
    (axes,) = charts.axes([story.read_story(made)])
    assert (axes["time"].steps[0], axes["time"].values[0]) == (1, 1.0)
    assert (axes["epoch"].steps, axes["epoch"].values) == ([1, 17, 33], [0, 1, 2])
    text = page.page([story.read_story(made)], {})
    assert '<option value="time">' in text and '<option value="epoch">' in text
    assert "epoch" not in charts.axes([story.read_story(experiment(tmp_path / "flat", steps=9))])[0]


@pytest.mark.parametrize(
    ("name", "better"),
    [("loss", "least"), ("val_loss", "least"), ("step_ms", "least"), ("val/acc", "most"),
     ("tokens_per_s", "most"), ("top1", "most"), ("lr", ""), ("glossary", "")],
)  # fmt: skip
def test_which_value_is_the_best(name: str, better: str) -> None:
    assert charts.better(name) == better


def add(made: Experiment, **line: object) -> None:
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps({"rank": 0, **line}) + "\n")


def test_a_checkpoint_that_was_pruned_stays_in_the_list(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=20)
    for step in (5, 10):
        when = {"time": 1_700_000_000.0 + step + 1.5, "step": step + 1}
        add(made, **when, saved_step=step, saved_bytes=4096, saved_s=0.1)
    told = [moment for moment in story.read_story(made).moments if "checkpoint" in moment.what]
    assert [(m.what, m.time, m.faint) for m in told] == [
        ("checkpoint of step 5, 4.1 kB", 1_700_000_006.5, False),
        ("checkpoint of step 10, 4.1 kB", 1_700_000_011.5, False),
    ]  # none is here: nobody knows which are elsewhere
    assert "saved_" not in page.page([story.read_story(made)], {})


def test_what_is_counted_is_said(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=5)
    add(made, step=6, step_ms=1.0, tokens=600, tokens_per_s=1000.0, unit="samples")
    text = page.page([story.read_story(made)], {})
    assert (
        "samples per second" in text
        and "Speed: samples" in text
        and "tokens" not in text.split("<script")[0]
    )


def sized(path: Path, ranks: int, speed: float, **more: float) -> Experiment:
    made = experiment(path, ranks=ranks, steps=3, slow=-1)
    file = made.path / "outputs" / "rank_00_metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({**each, "tokens_per_s": speed, **more}) + "\n" for each in lines)
    )
    return made


def test_sizes_are_compared_with_the_smallest(tmp_path: Path) -> None:
    runs = [
        sized(tmp_path / "large", 8, 6000.0, step_ms=133.0, data_ms=31.0),
        sized(tmp_path / "small", 2, 2000.0),
    ]
    found = scaling.sizes([story.read_story(each, 1) for each in runs])
    small, large = scaling.against_smallest(found)
    assert (small.efficiency, small.lost_ms, small.longer) == (1.0, 0.0, [])
    assert large.efficiency == pytest.approx(0.75) and large.idle_nodes == pytest.approx(0.5)
    assert large.lost_ms == pytest.approx(133 / 4) and large.longer == [("waiting for data", 30.0)]
    text = page.page([story.read_story(each, 1) for each in runs], {}, found)
    assert "0.5 of 2" in text and "75%" in text and "waiting for data +30 ms" in text


def test_runs_that_cannot_be_compared_by_size_are_refused(tmp_path: Path) -> None:
    same = [sized(tmp_path / name, 4, 1000.0) for name in ("one", "two")]
    with pytest.raises(UsageError, match="all of these have 4 ranks"):
        scaling.sizes([story.read_story(each, 1) for each in same])
    silent = experiment(tmp_path / "silent", steps=0)
    with pytest.raises(UsageError, match="silent has no metrics of its speed"):
        scaling.sizes([story.read_story(each, 1) for each in (same[0], silent)])
