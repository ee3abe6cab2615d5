"""What a launch waits for before it stands in the queue, and how it hears of what is free there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.start.claims import claims, queue
from orchestrator.head.start.claims.queue import QueuePlace, not_yet
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import resolve
from orchestrator.protocol.requests.claims import WAITING, Entry, Wish
from orchestrator.protocol.requests.start import Page, ReadBook
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord


def waiting(root: Path, **launch: Any) -> str:
    arguments = LaunchArguments(program=("train.py",), where=Where(experiments=root), launch=launch)
    return not_yet(resolve(arguments, ["master_launch"]))


def test_another_job_has_to_be_over_and_for_after_done(tmp_path: Path) -> None:
    experiment = experiments.create(tmp_path, "first")
    name, record = experiment.name, JobRecord("first-1", "first", "running", ["x"], [], 1.0)
    for state in ("queued", "running", "restarting"):
        experiment.write_signed(replace(record, state=state))
        assert waiting(tmp_path, after=(name,)) == f"not before {name} is over"
    experiment.write_signed(replace(record, state="failed"))
    with pytest.raises(CheckFailed, match=f"{name} has failed; nothing was started"):
        waiting(tmp_path, after=(name,))
    experiment.write_signed(replace(record, state="done"))
    assert waiting(tmp_path, after=(name,)) == ""
    with pytest.raises(UsageError, match=f"no experiment 'first_' in .*did you mean '{name}'"):
        waiting(tmp_path, after=("first_",))


ENTRY = Entry(id="0123456789abcdef", state=WAITING, job="train", since=1.0, wants=1)


class Node:
    """The channel to a node with four of eight GPUs free; a program that is no job has one."""

    def post(self, request: ReadBook) -> int:
        return 0

    def wait_for(self, number: int, request: ReadBook, *_: float) -> Page:
        return Page(entries=(), free=4 - request.programs, total=8, wants=8)


def test_a_dry_run_foresees_programs_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "wish_of", lambda *_: Wish())
    node = SimpleNamespace(node=SimpleNamespace(name="a"), channel=Node())
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


def place_on(monkeypatch: pytest.MonkeyPatch, **channels: Books) -> QueuePlace:
    """A launch that stands in the queue of these nodes."""
    monkeypatch.setattr(queue, "wish_of", lambda *_: None)
    facts = SimpleNamespace(boot="", network=0, clock_offset=0.0)
    reached = [
        SimpleNamespace(node=SimpleNamespace(name=name), channel=channel, facts=facts)
        for name, channel in channels.items()
    ]
    nodes = Nodes(cast("Any", None), cast("Any", None), cast("Any", tuple(reached)))
    place = QueuePlace(resolve(LaunchArguments(program=("true",)), ["master_launch"]), nodes)
    place.entered = True
    return place


def test_news_of_one_node_is_not_kept_until_the_others_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = Page(entries=(), free=1, total=1, wants=1)
    busy = free.replace(entries=(ENTRY.replace(id="f" * 16, state="running"),), free=0)
    quiet, lively = Books(busy, busy), Books(busy, free)
    place = place_on(monkeypatch, quiet=quiet, lively=lively)
    place.look(0.0)
    assert not quiet.called.is_set()
    place.look(3600.0)
    assert {name: page.free for name, page in place.pages.items()} == {"quiet": 0, "lively": 1}


def test_nodes_with_something_free_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    books = {
        name: Books(Page(entries=(), free=free, wants=1))
        for name, free in (("a", 0), ("b", 1), ("c", 1))
    }
    place = place_on(monkeypatch, **books)
    place.look(0.0)
    assert [node.node.name for node in place.free_first().reached] == ["b", "c", "a"]
