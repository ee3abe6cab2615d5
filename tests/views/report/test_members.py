"""The page of a sweep: the best so far, and a table of its members."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep.journal import About, Journal, MemberState
from orchestrator.views.report import command, members, page

HOSTILE = "<script>alert(1)</script>"
ENDS = [("done", 2.0), ("failed", None), ("done", 1.0)]


def swept(
    root: Path,
    values: Sequence[Mapping[str, str]],
    ends: Sequence[tuple[str, float | None]],
    best: str = "least",
    metric: str = "val_loss",
) -> Journal:
    """The journal of a sweep whose members were all given out, and the first ones have ended."""
    journal = journals.create_journal(root, "sweep", About(metric, best, len(values)))
    for number, each in enumerate(values):
        begun = MemberState(number, str(each), values=dict(each))
        journal.add(begun)
        if number < len(ends):
            state, value = ends[number]
            more = {"value": value, "seconds": 3.0, "experiment": f"sweep-{number}"}
            journal.add(replace(begun, state=state, **more))
    return journal


def html(journal: Journal) -> str:
    return page.page_of_members(members.read_members(journal))


def test_best_member_is_first(tmp_path: Path) -> None:
    values = [{"lr": "1e-4"}, {"lr": "1e-3"}, {"lr": "1e-2"}, {"lr": "1"}]
    read = members.read_members(swept(tmp_path, values, ENDS))
    assert [member.member for member in read.every] == [2, 0, 1, 3]
    assert read.summary() == "2 done, 1 failed, 1 not over"
    headings, rows = read.table()
    assert headings == ["lr", "val_loss", "time"]
    assert [cells for _, cells in rows[1:3]] == [["1e-4", "2", "3 s"], ["1e-3", "-", "3 s"]]
    most = members.read_members(swept(tmp_path, values, ENDS, "most"))
    assert [member.member for member in most.every] == [0, 2, 1, 3]


def test_best_so_far_never_worsens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 1000, 10))
    monkeypatch.setattr(journals.time, "time", lambda: next(clock))
    ends = [("done", 3.0), ("done", 4.0), ("failed", None), ("done", 1.0)]
    journal = swept(tmp_path, [{"lr": str(n)} for n in range(4)], ends)
    chart = members.read_members(journal).best_so_far()
    assert chart is not None and chart.over == "time"
    assert [line.curve.means for line in chart.lines] == [[3.0, 3.0, 1.0], [3.0, 4.0, 1.0]]
    assert chart.lines[0].curve.steps == [10, 30, 70]


def test_page_draws_curve_of_each_member_and_best_as_stair(tmp_path: Path) -> None:
    journal = swept(tmp_path, [{"lr": "1"}, {"lr": "2"}], [("done", 1.0), ("done", 2.0)])
    for number in (0, 1):
        printed = tmp_path / f"sweep-{number}" / "printed"
        printed.mkdir(parents=True)
        lines = [f'{{"step": {step}, "val_loss": {9 - step - number}}}\n' for step in range(3)]
        (printed / "rank_00_metrics.jsonl").write_text("".join(lines))
    read = members.read_members(journal)
    chart, best = read.curves(), read.best_so_far()
    assert chart is not None and best is not None and best.lines[0].stair
    assert [(line.name[0], line.curve.means) for line in chart.lines] == [
        ("0", [9, 8, 7]),
        ("1", [8, 7, 6]),
    ]
    text = html(journal)
    assert text.count("<figure") == 2 and 'href="../sweep-0/"' in text
    (tmp_path / "sweep-1" / "report.html").write_text("")
    assert 'href="../sweep-1/report.html"' in html(journal)


@pytest.mark.parametrize(
    ("values", "ends", "metric", "figures"),
    [
        ([{"lr": HOSTILE}, {"lr": "2"}], [("done", 1.0), ("done", 2.0)], "loss", 1),
        ([{"lr": "1"}, {"lr": "2"}], [("failed", None)], "loss", 0),
        ([{}, {}], [("done", None)], "", 0),
        ([], [], "", 0),
    ],
    ids=["two", "none that is done", "command lines without a metric", "nothing yet"],
)
def test_every_sweep_has_a_page(
    tmp_path: Path, values: Any, ends: Any, metric: str, figures: int
) -> None:
    text = html(swept(tmp_path, values, ends, "least" if metric else "", metric))
    assert text.count("<figure") == figures
    assert HOSTILE not in text and text.count("<script") == 2 and " style=" not in text


def test_report_finds_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = swept(tmp_path, [{"lr": "1"}], ENDS)
    where = Where(experiments=tmp_path)
    assert command.report(where, [journal.name], out=None, opened=False) == 0
    assert str(journal.path / "report.html") in capsys.readouterr().out


@pytest.mark.parametrize("line", ['{"member": "x"}', '{"member": 1, "at": -1}', "[]", "no JSON"])
def test_changed_journal_is_refused(tmp_path: Path, line: str) -> None:
    journal = swept(tmp_path, [{"lr": "1"}], ENDS)
    with (journal.path / journals.JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UsageError, match="was changed"):
        members.read_members(journal)
