"""The page of a sweep: what its members differ in, the best so far, a table of them all."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep.journal import About, Journal
from orchestrator.views.report import command, members, page
from tests.protocol.test_message import json_data
from tests.views.report.test_browser import browse

HOSTILE = "<script>alert(1)</script>"


def swept(
    root: Path,
    values: Sequence[Mapping[str, str]],
    ends: Sequence[tuple[str, float | None]],
    best: str = "least",
    metric: str = "val_loss",
) -> Journal:
    """The journal of a sweep whose members were all given out, and the first ones have ended."""
    journal = journals.create(root, "sweep", About(metric, best, len(values)))
    for number, each in enumerate(values):
        words = " ".join(f"{name}={value}" for name, value in each.items())
        journal.add(member=number, words=words, values=each)
        if number < len(ends):
            state, value = ends[number]
            more = {"value": value, "seconds": 3.0, "experiment": f"sweep-{number}"}
            problem = "rank 0 failed" if state == "failed" else ""
            journal.add(
                member=number, words=words, state=state, values=each, problem=problem, **more
            )
    return journal


def hundred(root: Path) -> Journal:
    """A hundred members: numbers, a logarithmic range, words; some failed, some still run."""
    dice = random.Random(7)
    values = [
        {
            "lr": f"{10 ** dice.uniform(-5, -2):.3g}",
            "optimizer": dice.choice(["adamw", "muon", HOSTILE, "a name that is longer than most"]),
            "layers": str(dice.choice([2, 4, 8, 16])),
        }
        for _ in range(100)
    ]
    ends: list[tuple[str, float | None]] = [("done", dice.uniform(1, 4)) for _ in range(95)]
    ends[3] = ("failed", None)
    ends[4] = ("done", None)
    return swept(root, values, ends)


def html(journal: Journal) -> str:
    return page.page_of_members(members.read(journal))


def test_the_best_is_first_and_drawn_last(tmp_path: Path) -> None:
    values = [{"lr": "1e-4"}, {"lr": "1e-3"}, {"lr": "1e-2"}, {"lr": "1"}]
    ends = [("done", 2.0), ("failed", None), ("done", 1.0)]
    read = members.read(swept(tmp_path, values, ends))
    assert [run.number for run in read.runs] == [2, 0, 1, 3]
    assert members.summary(read) == "2 done, 1 failed, 1 not over; the best first"
    axes, paths = members.coordinates(read)
    assert [axis.name for axis in axes] == ["lr", "val_loss"]
    assert [(path.run.number, path.look) for path in paths] == [
        (3, "other"),
        (1, "failed"),
        (0, "good-2"),
        (2, "good-0 best"),
    ]
    assert [len(path.points.split()) for path in paths] == [1, 1, 2, 2]
    most = members.read(swept(tmp_path, values, ends, "most"))
    assert [run.number for run in most.runs] == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("values", "places", "labels"),
    [
        (["2", "4", "3"], [0.0, 1.0, 0.5], ["2", "3", "4"]),
        (["1e-4", "1e-2", "1e-3"], [0.0, 1.0, 0.5], ["1e-4", "1e-3", "1e-2"]),
        (["adam", "sgd", "1"], [0.0, 0.5, 1.0], ["adam", "sgd", "1"]),
        (["5"], [0.0], ["5"]),
        (["nan", "1"], [0.0, 1.0], ["nan", "1"]),
    ],
)
def test_where_a_value_stands(values: list[str], places: list[float], labels: list[str]) -> None:
    scale = members.scale_of(values)
    assert [scale.places[value] for value in values] == pytest.approx(places)
    assert [text for _, text in scale.labels] == labels


def test_the_best_so_far_only_gets_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 1000, 10))
    monkeypatch.setattr(journals.time, "time", lambda: next(clock))
    ends = [("done", 3.0), ("done", 4.0), ("failed", None), ("done", 1.0)]
    journal = swept(tmp_path, [{"lr": str(n)} for n in range(4)], ends)
    (chart,) = members.over_time(members.read(journal))
    assert [line.curve.means for line in chart.lines] == [[3.0, 3.0, 1.0], [3.0, 4.0, 1.0]]
    assert chart.lines[0].curve.steps == [10, 30, 70] and chart.over == "time"


@pytest.mark.parametrize(
    ("values", "ends", "metric", "figures"),
    [
        ([{"lr": "1"}, {"lr": "2"}], [("done", 1.0), ("done", 2.0)], "loss", 2),
        ([{"lr": "1"}, {"lr": "2"}], [("failed", None)], "loss", 1),
        ([{"lr": "1"}], [("done", 1.0)], "loss", 1),
        ([{}, {}], [("done", None)], "", 0),
        ([], [], "", 0),
    ],
    ids=["two", "none that is done", "one", "command lines without a metric", "nothing yet"],
)
def test_any_sweep_has_a_page(
    tmp_path: Path, values: Any, ends: Any, metric: str, figures: int
) -> None:
    journal = swept(tmp_path, values, ends, "least" if metric else "", metric)
    assert html(journal).count("<figure") == figures


def test_nothing_that_a_member_is_called_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    text = html(hundred(tmp_path))
    assert HOSTILE not in text and "&lt;script&gt;alert(1)" in text
    assert text.count("<script") == 2 and " style=" not in text


def test_the_command_finds_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = hundred(tmp_path)
    where = Where(experiments=tmp_path)
    assert command.report(where, [journal.name], out=None, opened=False) == 0
    assert str(journal.path / "report.html") in capsys.readouterr().out
    out = tmp_path / "page.html"
    assert command.report(where, [journal.name], out=out, opened=False) == 0
    assert out.read_text() == (journal.path / "report.html").read_text()


@pytest.mark.browser
@pytest.mark.parametrize("look", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_it_is_drawn(tmp_path: Path, look: tuple[str, ...]) -> None:
    place = tmp_path / "report.html"
    place.write_text(html(hundred(tmp_path)))
    dom = browse(place, "--dump-dom", "--window-size=1000,1200", *look)
    assert re.search(r'data-drawn="1"', dom.stdout) and dom.stdout.count("<polyline") == 100
    assert "CONSOLE" not in dom.stderr


@settings(max_examples=12, derandomize=True, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.data())
def test_a_journal_with_anything_in_it_has_a_page_or_is_said_to_be_changed(
    tmp_path: Path, data: st.DataObject
) -> None:
    journal = swept(tmp_path / str(time.monotonic_ns()), [{"lr": "1"}, {"lr": "2"}], [("done", 1)])
    file = data.draw(
        st.sampled_from([journal.path / journals.JOURNAL, journal.path / journals.SWEEP])
    )
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    keys = ["member", "at", "state", "words", "values", "value", "seconds", "experiment",
            "problem", "metric", "best", "count"]  # fmt: skip
    changes = st.dictionaries(st.sampled_from(keys), json_data | st.just(1e37), min_size=1)
    at = data.draw(st.integers(0, len(lines) - 1))
    changed = data.draw(changes.map(lambda new: {**lines[at], **new}) | json_data)
    lines[at] = changed
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        read = members.read(Journal(journal.path))
    except UsageError as error:
        assert "was changed" in error.what
    else:
        page.page_of_members(read)
