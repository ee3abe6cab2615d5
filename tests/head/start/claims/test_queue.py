"""What a launch waits for before it stands in the queue, and how it hears of what is free there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments, Where, moment_of
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.start.claims import claims
from orchestrator.head.start.claims.claims import Occupied
from orchestrator.head.start.claims.queue import Place, Queue, not_yet
from orchestrator.head.start.nodes import ListedNodes, Nodes
from orchestrator.head.start.request import resolve
from orchestrator.protocol.facts import Policy
from orchestrator.protocol.requests.claims import WAITING, Entry, Wish
from orchestrator.protocol.requests.start import Claim, Claimed, Page, ReadBook, Unclaim, Wait
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord

NOON = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))


def waiting(root: Path, **launch: Any) -> str:
    arguments = LaunchArguments(program=("train.py",), where=Where(experiments=root), launch=launch)
    return not_yet(resolve(arguments, ["master_launch"]))


@pytest.mark.parametrize(
    ("at", "later"),
    [("12:00", 0), ("13:30", 5400), ("11:59", 86_340), ("2026-11-26 12:01", 60)],
)
def test_a_time_of_the_day_is_the_next_one(at: str, later: float) -> None:
    assert moment_of(at, NOON) - NOON == later


@pytest.mark.parametrize("at", ["25:00", "noon", "", "12"])
def test_what_is_no_time_is_refused(tmp_path: Path, at: str) -> None:
    with pytest.raises(UsageError, match="this is no time of a day"):
        waiting(tmp_path, at=at)


def test_a_time_that_has_come_is_waited_for_no_longer(tmp_path: Path) -> None:
    soon = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 3600))
    assert waiting(tmp_path, at=soon).startswith("not before ")
    assert waiting(tmp_path, at="2026-01-01 00:00") == ""


def test_another_job_has_to_be_over_and_for_after_done(tmp_path: Path) -> None:
    experiment = experiments.create(tmp_path, "first")
    name, record = experiment.name, JobRecord("first-1", "first", "running", ["x"], [], 1.0)
    for state in ("queued", "running", "restarting"):
        experiment.write_signed(replace(record, state=state))
        for option in ("after", "after_any"):
            assert waiting(tmp_path, **{option: (name,)}) == f"not before {name} is over"
    experiment.write_signed(replace(record, state="failed"))
    assert waiting(tmp_path, after_any=(name,)) == ""
    with pytest.raises(CheckFailed, match=f"{name} has failed; nothing was started"):
        waiting(tmp_path, after=(name,))
    experiment.write_signed(replace(record, state="done"))
    assert waiting(tmp_path, after=(name,), after_any=(name,)) == ""
    with pytest.raises(UsageError, match=f"no experiment 'first_' in .*did you mean '{name}'"):
        waiting(tmp_path, after=("first_",))


ENTRY = Entry(id="0123456789abcdef", state=WAITING, job="train", since=1.0, wants=1)


class Node:
    """A node of eight GPUs, four of which a job holds that may make way; a user may have four."""

    def __init__(self, *, strangers: int = 0, most: int = 0, user: str = "ada") -> None:
        self.strangers, self.most, self.user = strangers, most, user
        self.asked: list[object] = []
        self.entries: dict[str, Entry] = {}

    def post(self, request: object) -> int:
        self.asked.append(request)
        return len(self.asked)

    def wait_for(self, number: int, request: object, *_: float) -> object:
        return self.answer(request)

    def ask(self, request: object, timeout: float) -> object:
        return self.wait_for(self.post(request), request, timeout)

    def answer(self, request: object) -> object:
        if isinstance(request, Wait):
            self.entries[request.entry.id] = request.entry.replace(user=self.user)
        if isinstance(request, Claim):
            return Claimed(held=True)
        if not isinstance(request, ReadBook):
            return None
        keys = tuple(f"gpu-{index}" for index in range(4))
        runs = Entry(id="f" * 16, state="running", job="low", since=1.0, user="ada", keys=keys)
        return Page(
            entries=(runs.replace(resumes=True), *self.entries.values()),
            free=4 - self.strangers * request.programs,
            total=8,
            wants=8,
            gpus=4,
            own=4,
            policy=Policy(gpus_per_user=self.most, file="p.yaml"),
        )

    def beat(self) -> None: ...


def looks(node: Node) -> Queue:
    mine = ENTRY.replace(priority=1, preempts=True)
    line = Queue(mine, [Place("a", cast("NodeChannel", node))], 1, lambda _: None)
    line.enter()
    return line


@pytest.mark.parametrize(("strangers", "asked"), [(0, {"a": ("f" * 16,)}), (1, {})])
def test_nobody_makes_way_for_who_would_wait_for_a_program_then(
    strangers: int, asked: Mapping[str, Sequence[str]]
) -> None:
    node = Node(strangers=strangers)
    line = looks(node)
    for _ in range(3):
        line.ask_for_way(line.machines)
    assert line.asked == asked
    assert sum(getattr(one, "programs", False) for one in node.asked) == 1  # it costs a command


@pytest.mark.parametrize(("user", "waits"), [("ada", False), ("bob", True)])
def test_jobs_of_the_same_user_that_make_way_count_no_more(user: str, waits: bool) -> None:
    line = looks(Node(most=4, user=user))
    assert bool(line.against_the_rules(line.machines)) == waits
    line.ask_for_way(line.machines)
    assert bool(line.asked) != waits


@pytest.mark.parametrize("most", [0, 3, 4])
def test_who_goes_on_keeps_the_rules(most: int) -> None:
    node = Node(most=most)
    line = Queue(ENTRY, [Place("a", cast("NodeChannel", node))], 1, lambda _: None)
    if most != 3:
        line.hold()
        return
    with pytest.raises(Occupied, match="the rules: your jobs have 4 already"):
        line.hold()
    assert isinstance(node.asked[-1], Unclaim)


def test_a_dry_run_foresees_programs_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "wish_of", lambda *_: Wish())
    node = SimpleNamespace(node=SimpleNamespace(name="a"), channel=Node(strangers=1))
    (line,) = claims.foreseen(cast("Any", None), [cast("Any", node)])
    assert "3 of 8 free" in line and "a launch would be refused" in line


class Books:
    """The channel to a node on which nothing changes, until it has news or is called."""

    def __init__(self, *pages: Page) -> None:
        self.pages, self.called = list(pages), threading.Event()

    def ask(self, request: ReadBook, timeout: float) -> Page:
        page = self.pages.pop(0)
        if request.seconds and page.entries == request.before:
            assert self.called.wait(60.0), "nobody has called"
        return page

    def beat(self) -> None:
        self.called.set()


def queue_on(**channels: Books) -> Queue:
    places = [Place(name, cast("NodeChannel", channel)) for name, channel in channels.items()]
    return Queue(ENTRY, places, 1, lambda _: None)


def test_news_of_one_node_is_not_kept_until_the_others_have_some() -> None:
    free = Page(entries=(), free=1, total=1, wants=1)
    busy = free.replace(entries=(ENTRY.replace(id="f" * 16, state="running"),), free=0)
    quiet, lively = Books(busy, busy), Books(busy, free)
    line = queue_on(quiet=quiet, lively=lively)
    line.look(0.0)
    assert not quiet.called.is_set()
    line.look(3600.0)
    assert [machine.free for machine in line.machines] == [0, 1]


def test_nodes_with_something_free_are_asked_first() -> None:
    names = ("a", "b", "c")
    line = queue_on(
        **{
            name: Books(Page(entries=(), free=free, wants=1))
            for name, free in zip(names, (0, 1, 1), strict=True)
        }
    )
    line.look(0.0)
    reached = [SimpleNamespace(node=SimpleNamespace(name=name)) for name in names]
    nodes = Nodes(
        ListedNodes((), None, strict=False), cast("Any", None), cast("Any", tuple(reached))
    )
    assert [node.node.name for node in line.free_first(nodes).reached] == ["b", "c", "a"]
