"""One color for one run, colors that everybody can tell apart, axes, saves, and sizes compared."""

import json
from pathlib import Path

import pytest

from orchestrator.records.experiment import Experiment
from orchestrator.views.report import charts, page, run_data
from tests.views.report.reports import experiment, sample_machines

# How light reaches an eye that lacks one kind of cone (Machado, Oliveira and Fernandes, 2009).


def test_run_has_one_color_and_metric_one_dash(tmp_path: Path) -> None:
    both = [experiment(tmp_path / name, steps=20) for name in ("one", "two")]
    for made in both:
        sample_machines(made)
    add(both[1], step=20, eval_loss=0.5)
    told = [run_data.read_run_data(made, 1) for made in both]
    found = charts.metric_charts(told)
    of_a_run = {
        (line.run, line.color) for chart in found if not chart.stacked for line in chart.lines
    }
    assert of_a_run == {(0, 0), (1, 1)}
    loss = next(chart for chart in found if chart.title == "Loss")
    assert [(line.name, line.color, line.dash) for line in loss.lines] == [
        ("one training", 0, 0), ("two training", 1, 0), ("two held out", 1, 1),
    ]  # fmt: skip
    # A curve of machines is of an experiment, and has its color.
    assert {line.color for chart in charts.of_machines(told) for line in chart.lines} == {0, 1}


def test_fifth_line_is_dashed(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=0, ranks=4)
    sample_machines(made, nodes=6)
    lines = charts.of_machines([run_data.read_run_data(made)])[0].lines
    assert [(line.color, line.dash) for line in lines] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1),
    ]  # fmt: skip


def test_steps_have_a_time(tmp_path: Path) -> None:
    told = run_data.read_run_data(experiment(tmp_path / "run", steps=40))
    ((steps, times),) = charts.script_data([told])["axes"]
    assert (steps[:2], times[:2]) == ([1, 2], [1, 2])
    assert '<option value="time">' in page.report_page([told], {})


@pytest.mark.parametrize(
    ("name", "better"),
    [("loss", "least"), ("val_loss", "least"), ("step_ms", "least"), ("val/acc", "most"),
     ("tokens_per_s", "most"), ("top1", "most"), ("lr", ""), ("glossary", "")],
)  # fmt: skip
def test_better_is_decided_by_metric_name(name: str, better: str) -> None:
    assert charts.better_direction(name) == better


def add(made: Experiment, **line: object) -> None:
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps({"rank": 0, **line}) + "\n")


def test_speed_names_its_unit(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=5)
    add(made, step=6, step_ms=1.0, tokens=600, tokens_per_s=1000.0, unit="samples")
    text = page.report_page([run_data.read_run_data(made)], {})
    assert "samples per second" in text and "tokens" not in text.split("<script")[0]


def sized(path: Path, ranks: int, speed: float, **more: float) -> Experiment:
    made = experiment(path, ranks=ranks, steps=3, slow=-1)
    file = made.path / "outputs" / "rank_00_metrics.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({**each, "tokens_per_s": speed, **more}) + "\n" for each in lines)
    )
    return made


def test_sizes_are_compared_per_rank(tmp_path: Path) -> None:
    runs = [sized(tmp_path / "large", 8, 6000.0), sized(tmp_path / "small", 2, 2000.0)]
    headings, rows = page.runs_table([run_data.read_run_data(each, 1) for each in runs], {})
    at = headings.index("per second and rank")
    assert [cells[at] for _, _, cells in rows] == ["750", "1k"]
