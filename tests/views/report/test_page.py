"""The page shows the known facts, and no log or name can run a script in it."""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.status import comparison
from orchestrator.records.experiment import Attempt, Experiment
from orchestrator.records.outcome import JobVerdict
from orchestrator.views.report import charts, page, run_data
from orchestrator.views.report import command as report
from tests.views.report.reports import STARTED, experiment, line, train_again

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Parts(HTMLParser):
    """The elements of a page, its words, and what its scripts contain."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.words += f"{data} "


def compared(experiments: Sequence[Experiment]) -> comparison.Differences:
    return comparison.find_differences(*map(comparison.describe_experiment, experiments))


def parts_of(*experiments: Experiment) -> Parts:
    told = [run_data.read_run_data(each, len(experiments) - 1) for each in experiments]
    return Parts(page.report_page(told, compared(experiments)))


def drawn(parts: Parts, script: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(parts.scripts[script])
    return data


def test_page_of_training_has_every_section(tmp_path: Path) -> None:
    parts = parts_of(experiment(tmp_path / "run"))
    wanted = {
        "run", "done", "after 1 min 00 s", "2 x 2", "Loss", "Norm of the gradients",
        "Where a step's time goes", "alpha", "+3.0 s", "all ranks run", "hello from beta",
        "1 step skipped for NaN or inf", "(step 151)", "lr: 0.1", "a.py", "LR=1", "17.2 GB",
    }  # fmt: skip
    assert [words for words in wanted if words not in parts.words] == []
    data = drawn(parts)
    assert len(data["charts"]) == parts.tags.count("figure")
    split = next(chart for chart in data["charts"] if chart["stacked"])
    assert [line["means"][0] for line in split["lines"]] == [1, 60, 5, 34]
    (bad,) = [mark for mark in data["marks"] if mark["step"]]
    assert bad == {
        "words": "1 step skipped for NaN or inf (step 151)",
        "bad": True,
        "step": 151,
        "seconds": 151,
    }
    made = experiment(tmp_path / "gpus", steps=1)
    waits = {**line(0, 2, -1), "exposed_comm_ms": 20.0}
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps(waits) + "\n")
    lines = [each for chart in drawn(parts_of(made))["charts"] for each in chart["lines"]]
    assert all(each["name"] for each in lines), "the legend would call it Value"


def test_validation_shares_chart_with_training(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=3)
    epochs = [
        {"step": step, "train_loss": 2.0, "val_loss": 3.0, "train_x": 1.0, "val_y": 1.0, "acc": 0.5}
        for step in (1, 2, 3)
    ]
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in epochs))
    own = charts.metric_charts([run_data.read_run_data(made)])
    known = {chart.title: [line.name for line in chart.lines] for chart in own}
    assert known["Loss per epoch"] == ["train_loss", "val_loss"]
    assert {"train_x", "val_y", "acc"} < known.keys()
    assert not {"train_loss", "val_loss"} & known.keys()


@pytest.mark.parametrize(("last", "said"), [(None, "last loss NaN or inf"), (0.5, "last loss 0.5")])
def test_lost_loss_is_not_replaced_by_earlier_one(
    tmp_path: Path, last: float | None, said: str
) -> None:
    made = experiment(tmp_path / "run", steps=3)
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": last, "step_ms": 9.0}) + "\n")
        # The epoch writes this line.
        file.write(json.dumps({"step": 4, "val_loss": 1.0}) + "\n")
    assert said in parts_of(made).words


def test_endless_line_is_cut(tmp_path: Path) -> None:
    """Forty lines of 64 KiB from each of 64 nodes would make the page too large to send."""
    made = experiment(tmp_path / "run", steps=3)
    made.log(made.read_record().nodes[0]).write_text(f"first{'x' * 60_000}last\n" * 40)
    text = page.report_page([run_data.read_run_data(made)], {})
    small = len(
        page.report_page([run_data.read_run_data(experiment(tmp_path / "small", steps=3))], {})
    )
    assert len(text) - small < 41 * run_data.LONGEST_LINE_CHARACTERS + 1000
    assert "first" in text and "last" in text


def test_newest_trainer_is_drawn(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run")
    train_again(made, steps=7)
    parts = parts_of(made)
    assert "steps 7" in parts.words and "last loss 9" in parts.words
    assert len(drawn(parts)["charts"][0]["lines"]) == 1


def test_text_of_job_is_escaped(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=3)
    record = made.read_record()
    nodes = [dataclasses.replace(node, name=EVIL, state=EVIL) for node in record.nodes]
    verdict = {
        "kind": "exception", "title": EVIL, "message": EVIL, "where": EVIL, "fix": EVIL, "node": 0,
        "node_name": EVIL, "rank": 1, "time": STARTED, "same": [], "also": [], "others": 0,
    }  # fmt: skip
    command = ["master_launch", EVIL]
    made.write_record(
        dataclasses.replace(record, nodes=nodes, command=command, verdict=verdict, state="failed")
    )
    made.write("config.yaml", EVIL)
    made.write(
        "manifest.json",
        json.dumps({"code": {"changed_files": [EVIL]}, "nodes": [EVIL, {"facts": 3}]}),
    )
    made.log(record.nodes[0]).write_text(EVIL + "\n")
    metrics = made.path / "outputs" / "rank_00_metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, EVIL: 5.0, "step_ms": 1.0}) + "\n")
    text = page.report_page([run_data.read_run_data(made)], {})
    parts = Parts(text)
    assert parts.tags.count("script") == 2 and "img" not in parts.tags
    assert not any(name.startswith("on") for name, _ in parts.attributes)
    # The page shows it as text.
    assert parts.words.count("alert(1)") >= 6
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy and f"script-src {page.content_hash(parts.scripts[1])};" in policy[1]


RANK_FAILED = JobVerdict(
    kind="exception", title="node lost", message="KeyError: 'labels'", rank=2, node=0,
    where="train.py:7 in load", traceback="Traceback (most recent call last):\n  boom",
)  # fmt: skip


def test_attempts_are_listed_and_marked(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=20)
    lost = Attempt(
        1, STARTED, STARTED + 30, "lost", 4, RANK_FAILED, ["alpha"], step=7,
        restarted=True, why="a spare takes its place",
    )  # fmt: skip
    last = Attempt(2, STARTED + 31, STARTED + 60, "done", 0, None, ["alpha"])
    made.write_record(dataclasses.replace(made.read_record(), attempts=[lost, last]))
    parts = parts_of(made)
    assert "attempt 1 ended: node lost; started again: a spare takes its place" in parts.words
    text = page.report_page([run_data.read_run_data(made)], {})
    (cause,) = re.findall('<pre class="cause">(.*?)</pre>', text, re.DOTALL)
    # The page escapes it.
    assert "KeyError" in cause and "KeyError: 'labels'" not in cause
    assert "train.py:7" in cause
    assert "Traceback (most" in parts.words and "attempt 2" not in parts.words
    data = drawn(parts)
    assert [mark["seconds"] for mark in data["marks"] if mark.get("step") == 7] == [30]


def test_partial_copy_is_shown(tmp_path: Path) -> None:
    made, whole = experiment(tmp_path / "run", steps=5), experiment(tmp_path / "whole", steps=5)
    made.write("manifest.json", '{"nodes": [')
    made.write("config.yaml", "a: [")
    made.write_record(dataclasses.replace(made.read_record(), started=STARTED + 1e9))
    for parts in (parts_of(made), parts_of(made, whole)):
        assert "manifest.json cannot be read" in parts.words and "Loss" in parts.words
        # The time is not negative, even if the clocks differ.
        assert "after 0" in parts.words
    section = compared([made, whole])["code"]
    assert "cannot be read" in section["not read"][0] and section["not read"][1] is None


def test_unreadable_metrics_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = experiment(tmp_path / "run", steps=5).path / "outputs"
    (outputs / "rank_00_metrics.jsonl").chmod(0)
    outputs.chmod(0o755)
    # The directories above it are open to all users.
    monkeypatch.chdir(outputs)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        (told,) = run_data.unreadable_metrics(Path())
    finally:
        os.seteuid(me)
    assert told.what.startswith("rank_00_metrics.jsonl cannot be read: Permission denied")
    assert not [*run_data.unreadable_metrics(outputs)] or me != 0


def test_log_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    made = experiment(tmp_path / "run", steps=3)
    (tmp_path / "secret").write_text("hidden\n")
    log = made.log(made.read_record().nodes[0])
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    words = parts_of(made).words
    assert f"{log.name} cannot be read" in words and "hidden" not in words


def test_several_experiments_are_compared(tmp_path: Path) -> None:
    one, two = experiment(tmp_path / "one"), experiment(tmp_path / "two", steps=50)
    two.write("config.yaml", "optimizer:\n  lr: 0.7\n")
    parts = parts_of(one, two)
    assert "What differs" in parts.words and "config: optimizer.lr" in parts.words
    loss = drawn(parts)["charts"][0]
    assert [line["name"] for line in loss["lines"]] == ["one", "two"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "There are no metrics of this job"),
        ({"state": "running", "ended": None, "exit_code": None}, "running"),
        ({"steps": 0, "state": "starting", "ended": None}, "starting"),
    ],
    ids=["a program without metrics", "a job that runs", "one that has not begun"],
)
def test_every_job_has_a_page(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    made = experiment(tmp_path / "run", **changes)
    for name in ("manifest.json", "config.yaml"):
        (made.path / name).unlink()
    assert words in parts_of(made).words


def test_report_writes_file_where_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "experiments"
    for name in ("run_20260101_000000", "run_20260102_000000"):
        experiment(root / name, steps=20)
    where = Where(experiments=root)
    assert report.report(where, [], out=None, opened=False) == 0
    written = root / "run_20260102_000000" / "report.html"
    assert written.stat().st_mode & 0o777 == 0o600
    assert str(written) in capsys.readouterr().out
    both = ["run_20260101_000000", "run_20260102_000000"]
    report.report(where, both, out=tmp_path / "both.html", opened=False)
    assert "What differs" in (tmp_path / "both.html").read_text()
    with pytest.raises(UsageError, match="cannot be written"):
        report.report(where, both, out=tmp_path / "no" / "x.html", opened=False)
    with pytest.raises(UsageError, match="at most 8"):
        report.report(where, ["x"] * 9, out=None, opened=False)
    written.unlink()
    # Like a read-only disk, it accepts no files.
    written.mkdir()
    with pytest.raises(UsageError, match="--out FILE") as refused:
        report.report(where, [], out=None, opened=False)
    assert str(written) in str(refused.value)
