"""Files that grow on a node grow here: the node's own session answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.head.transfer import growing, home
from orchestrator.head.transfer.growing import GROWS, GrowingFiles
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.protocol.requests.transfer import OutputFile, OutputFiles
from tests.records.one_node import NODE

JOB = "job_20260101_000000-abcdef"


class Node:
    """A node with a run directory of its own, and its session."""

    def __init__(self, home: Path) -> None:
        self.outputs = home / "runs" / JOB / "0" / "experiment" / "outputs"
        self.outputs.mkdir(parents=True)
        self.session = ServerSession()

    def write(self, name: str, text: str) -> None:
        path = self.outputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def serve(self, files: GrowingFiles) -> None:
        """Answer until nothing is asked any more."""
        files.next_look = 0.0
        while request := files.question():
            assert files.question() is None, "one at a time"
            try:
                files.answered(request, self.session.answer(request))
            except Refusal:
                files.refused(request)


@pytest.fixture
def node(login: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(growing, "GROWTH_SECONDS", 3600.0)
    return Node(login)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def test_growing_file_is_mirrored(node: Node, here: Path) -> None:
    files = GrowingFiles(JOB, NODE, here)
    node.serve(files)
    assert not here.exists()
    large = "".join(f"{number}\n" for number in range(300_000))  # several pieces
    for _ in range(2):
        node.write("rank_0.jsonl", large)
        node.write("a b/é.csv", "1,2\n")
        node.write("results/rank_0.pkl", "comes whole")
        node.serve(files)
        for name in ("rank_0.jsonl", "a b/é.csv"):
            assert (here / name).read_bytes() == (node.outputs / name).read_bytes()
            assert (here / name).stat().st_mode & 0o777 == 0o600
    assert not (here / "results").exists()
    inode = (here / "rank_0.jsonl").stat().st_ino
    node.write("rank_0.jsonl", "more\n")
    node.serve(files)
    assert (here / "rank_0.jsonl").stat().st_ino == inode, "for tail -f"


def test_new_head_continues_own_files_alone(node: Node, here: Path) -> None:
    node.write("own.jsonl", "one\n")
    node.write("other.jsonl", "one\n")
    node.serve(GrowingFiles(JOB, NODE, here))
    (here / "other.jsonl").write_text("two\n")
    for name in ("own.jsonl", "other.jsonl"):
        node.write(name, "three\n")
    files = GrowingFiles(JOB, NODE, here)
    for _ in range(2):
        node.serve(files)
    assert (here / "own.jsonl").read_text() == "one\nthree\n"
    assert (here / "other.jsonl").read_text() == "two\n"
    assert files.grown == {"own.jsonl"}


def test_broken_connection_leaves_no_open_request(node: Node, here: Path) -> None:
    files = GrowingFiles(JOB, NODE, here)
    files.next_look = 0.0
    assert files.question() is not None and files.question() is None
    files.begin()
    node.write("x.csv", "1\n")
    node.serve(files)
    assert (here / "x.csv").read_text() == "1\n"
    files.next_look = 0.0
    files.refused(files.question())
    files.next_look = 0.0
    assert files.question() is not None


def test_local_changes_are_left_alone(node: Node, here: Path, tmp_path: Path) -> None:
    files = GrowingFiles(JOB, NODE, here)
    node.write("a.jsonl", "one\n")
    node.write("b.jsonl", "one\n")
    node.write("c.jsonl", "one\n")
    node.serve(files)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (here / "a.jsonl").unlink()
    (here / "a.jsonl").symlink_to(elsewhere)
    (here / "b.jsonl").unlink()
    (here / "c.jsonl").unlink()
    (here / "c.jsonl").mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        node.write(name, "two two two two two two\n" * 100)
    for _ in range(3):
        node.serve(files)
    assert elsewhere.read_text() == "mine"
    assert (here / "b.jsonl").read_text() == (node.outputs / "b.jsonl").read_text()


def test_paths_outside_are_ignored(here: Path) -> None:
    files = GrowingFiles(JOB, NODE, here)
    names = ("../x.jsonl", "/tmp/x.jsonl", "a/../../x.jsonl", "")
    listed = tuple(OutputFile(path=name, size=5) for name in names)
    files.next_look = 0.0
    request = files.question()
    assert request is not None
    files.answered(request, OutputFiles(files=listed, place="/x"))
    assert not files.questions


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("rank_0_metrics.jsonl", True),
        ("runs/events.out.tfevents.1700000000.host.1.0", True),
        ("profile/rank_00.json.gz", True),
        ("table.csv", True),
        ("results/rank_0.pkl", False),
        ("model.safetensors", False),
        ("notes.txt", False),
    ],
)
def test_grows_matches_text_results(name: str, grows: bool) -> None:
    assert bool(GROWS.fullmatch(name)) is grows


# -- metrics of the node's ranks -------------------------------------------------------------------

METRICS = "rank_00_metrics.jsonl"


def steps(first: int, last: int, attempt: int) -> str:
    return "".join(
        json.dumps({"time": attempt, "step": step}) + "\n" for step in range(first, last + 1)
    )


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(steps(1, 7, 1), id="it has cut its file"),
        pytest.param("", id="it began from the start"),
        pytest.param(steps(1, 12, 1), id="not all had come"),
        pytest.param(steps(1, 7, 1) + steps(8, 10, 3), id="it has the same length again"),
    ],
)
def test_truncation_by_restarted_rank_is_mirrored(node: Node, here: Path, kept: str) -> None:
    """Also for a head that comes later, and for one that was ended in the middle of a line."""
    here.mkdir()
    (here / METRICS).write_text(steps(1, 10, 1))
    node.write(METRICS, steps(1, 10, 1))
    files = GrowingFiles(JOB, NODE, here)
    node.serve(files)
    (node.outputs / METRICS).write_text(kept)
    node.serve(files)
    assert (here / METRICS).read_text() == kept
    for line in steps(8, 12, 3).splitlines(keepends=True):
        for part in (line[:9], line[9:]):
            node.write(METRICS, part)
            node.serve(files)
    assert (here / METRICS).read_text() == kept + steps(8, 12, 3)
    node.serve(GrowingFiles(JOB, NODE, here))
    assert (here / METRICS).read_text() == kept + steps(8, 12, 3)


def test_bring_fetches_last_lines(node: Node, here: Path) -> None:
    here.mkdir()
    (here / METRICS).write_text(steps(1, 10, 1))
    node.write(METRICS, steps(1, 7, 1) + steps(8, 10, 2))
    channel = cast("Any", SimpleNamespace(ask=lambda request, _: node.session.answer(request)))
    said, _ = home.bring_outputs(channel, GrowingFiles(JOB, NODE, here))
    assert not said
    assert (here / METRICS).read_text() == steps(1, 7, 1) + steps(8, 10, 2)


def test_metrics_of_other_nodes_rank_are_ignored(node: Node, here: Path) -> None:
    here.mkdir()
    name = "rank_07_metrics.jsonl"
    (here / name).write_text(steps(1, 10, 1))
    node.write(name, steps(8, 30, 2))
    files = GrowingFiles(JOB, NODE, here)
    node.serve(files)
    assert not files.grown and (here / name).read_text() == steps(1, 10, 1)
