"""One color for one run, colors that everybody can tell apart, axes, saves, and sizes compared."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from orchestrator.records.experiment import Experiment
from orchestrator.views.report import charts, page, story
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


def test_steps_have_a_time(tmp_path: Path) -> None:
    told = story.read_story(experiment(tmp_path / "run", steps=40))
    ((steps, times),) = charts.pictures([told])["axes"]
    assert (steps[:2], times[:2]) == ([1, 2], [1, 2])
    assert '<option value="time">' in page.page([told], {})


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


def test_what_is_counted_is_said(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=5)
    add(made, step=6, step_ms=1.0, tokens=600, tokens_per_s=1000.0, unit="samples")
    text = page.page([story.read_story(made)], {})
    assert "samples per second" in text and "tokens" not in text.split("<script")[0]


def sized(path: Path, ranks: int, speed: float, **more: float) -> Experiment:
    made = experiment(path, ranks=ranks, steps=3, slow=-1)
    file = made.path / "outputs" / "rank_00_metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({**each, "tokens_per_s": speed, **more}) + "\n" for each in lines)
    )
    return made


def test_sizes_are_compared_by_what_a_rank_contributes(tmp_path: Path) -> None:
    runs = [sized(tmp_path / "large", 8, 6000.0), sized(tmp_path / "small", 2, 2000.0)]
    headings, rows = page.runs([story.read_story(each, 1) for each in runs])
    at = headings.index("per second and rank")
    assert [cells[at] for _, _, cells in rows] == ["750", "1k"]
