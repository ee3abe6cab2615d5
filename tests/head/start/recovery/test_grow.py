"""Which nodes could join a job, and what speaks against one."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import Launch
from orchestrator.head.connect.reach import Reached, open_channel
from orchestrator.head.connect.subprocess_transport import (
    LocalTransport,
    ProcessConnection,
)
from orchestrator.head.follow.job_end import Change
from orchestrator.head.follow.restarts import Restarts
from orchestrator.head.nodes.facts import Facts
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start.recovery import grow
from orchestrator.node.job.run_directory import RunDir
from orchestrator.protocol.facts import Disk
from orchestrator.protocol.requests.machine import Probe, ProbeTarget
from orchestrator.records import cordons
from orchestrator.records.experiment import RESIZED, JobRecord, NodeRecord
from tests.head.connect.test_channel import Login
from tests.head.plan.probed import facts
from tests.head.start.recovery.test_gather import node, record
from tests.node.start.test_next_spec import FIRST

ONCE = Launch(nnodes="2:3", max_restarts=1)


def running(nodes: str, spares: str, nnodes: str | None = "2:3", **more: Any) -> JobRecord:
    job = replace(record(nodes, spares=spares, nnodes=nnodes), state="running", **more)
    return replace(job, launch=replace(job.launch, nnodes=nnodes))


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (running("ac", "b"), True),
        (running("ac", "b", attempts=[]), True),
        (running("abc", "d"), False),  # all that it may have
        (running("ac", ""), False),
        (running("ac", "b", None), False),
        (replace(running("ac", "b"), launch=Launch(nnodes="2:3")), False),  # it is never restarted
        (replace(running("ac", "b"), launch=replace(ONCE, grow_every=0)), False),
        (replace(running("ac", "b"), launch=ONCE), True),
    ],
)  # fmt: skip
def test_who_may_grow(job: JobRecord, expected: bool) -> None:
    assert (Restarts(job).has_fewer_nodes and bool(job.spares)) is expected


class Nobody:
    def absent(self, record: JobRecord) -> list[Any]:
        return []

    def reach(self, node: Any) -> Any:
        raise AssertionError(node)

    def stand_by(self, reached: Any, say: Any) -> Any:
        raise AssertionError(reached)


def test_as_many_join_as_there_is_room_for() -> None:
    job = running("ac", "bde", "2:4")
    none = dict.fromkeys("bde", "")
    assert grow.chosen(job, none) == set("acbd")
    assert grow.chosen(job, {**none, "b": "its disk is full"}) == set("acde")
    assert grow.chosen(job, dict.fromkeys("bde", "its disk is full")) == set("ac")
    gone = replace(job, spares=[replace(one, state="lost") for one in job.spares])
    larger = grow.larger(gone, ["b", "d"])
    assert larger.why == "b, d can join: on with 4 nodes instead of 2"
    assert [one.state for one in larger.spares] == ["standing by", "standing by", "lost"]


def test_who_is_not_even_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "login"))
    job, b = running("ac", "b"), node(2, "b")
    assert not Restarts(job).refusal(b)
    first = job.attempts[0]
    vain = [replace(first, state=RESIZED), replace(first, number=2, nodes=["a", "c", "b"])]
    strikes = replace(job, attempts=[replace(vain[0], nodes=["a", "c"]), vain[1]] * 3)
    assert "has joined 3 times" in Restarts(strikes).refusal(b)
    cordons.add(["b"], "a bad fan")
    assert Restarts(job).refusal(b).startswith("is cordoned (a bad fan")


class Speechless:
    """A way to a node that lets us in, and then says nothing that makes sense."""

    timeout = 10.0
    address = ""

    def __init__(self) -> None:
        self.opened: list[Login] = []

    def host_of(self, node: Node) -> str:
        return node.host

    def connect(self, node: object, timeout: float | None = None) -> Login:
        self.opened.append(Login(("/bin/sh", "-c", "exit 3"), ""))
        return self.opened[-1]


def test_a_look_that_comes_to_nothing_leaves_no_connection() -> None:
    """There is one every few minutes, for as long as the job runs."""
    transport, job = Speechless(), running("ac", "b")
    looking = grow.Growth(job, transport, list[str]().append)
    looking.search(job)
    looking.search(job)
    assert [one.closed for one in transport.opened] == [True, True]


class Counted(LocalTransport):
    """Every node is this machine."""

    def __init__(self) -> None:
        self.logins = 0

    def connect(self, node: object, timeout: float | None = None) -> ProcessConnection:
        self.logins += 1
        return super().connect(node, timeout)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What node 0 has kept of the job that running_here() describes."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(grow, "CHECKPOINT_SECONDS", 0.05)
    state = tmp_path / "memory" / "state"
    state.parent.mkdir()
    state.touch()
    os.utime(state, (20.0, 20.0))
    run = RunDir(running_here().job, 0)
    run.create()
    run.write_spec(FIRST.replace(env={"ORCHESTRATOR_RESUME_DIR": str(state.parent)}))
    return state


def here(one: NodeRecord) -> NodeRecord:
    return replace(one, python=sys.executable, nproc=1)


def running_here(nnodes: str = "2:3") -> JobRecord:
    job = running("ac", "b", nnodes, attempts=[])
    return replace(job, nodes=list(map(here, job.nodes)), spares=list(map(here, job.spares)))


def larger_in_time(looking: grow.Growth, job: JobRecord, state: Path, quiet: float) -> Change:
    """Keep something new once it was awaited for so long."""
    looking.next_look, deadline = 0.0, time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if (larger := looking.check(job)) is not None:
            return larger
        if looking.kept_before is not None and time.monotonic() > deadline - 60.0 + quiet:
            os.utime(state, (30.0, 30.0))
        time.sleep(0.01)
    raise AssertionError(looking.said)


def test_a_new_checkpoint_is_awaited_on_one_connection(state: Path) -> None:
    """It may take hours: no node is logged into every other second for so long."""
    transport, job = Counted(), running_here()
    looking = grow.Growth(job, transport, list[str]().append)
    assert larger_in_time(looking, job, state, 3.0).why.startswith("b can join")
    assert transport.logins == 4  # to node 0 and to b, before it and after it


class Full(Nobody):
    """A node that was away at the launch, and has no room for the code."""

    def absent(self, record: JobRecord) -> list[Any]:
        return [Node("d", python=sys.executable)]

    def reach(self, node: Any) -> Any:
        connection = LocalTransport().connect(Node("here"))
        channel = open_channel(connection, node, 10.0)
        probe = Probe(cwd="/", workdir=None, peers=(), target=TARGET)
        known = Facts(**vars(channel.ask(probe, 10.0)))
        return here(replace(running_here().spares[0], name="d")), Reached(node, known, channel)

    def stand_by(self, reached: Any, say: Any) -> Any:
        raise NodeError("its disk is full")


def test_one_that_cannot_be_given_a_part_keeps_no_other_away(state: Path) -> None:
    said: list[str] = []
    job = running_here("2:4")
    looking = grow.Growth(job, Counted(), said.append, Full())
    larger = larger_in_time(looking, job, state, 0.0)
    assert larger.why == "b can join: on with 3 nodes instead of 2"
    assert [one.name for one in larger.spares] == ["b"]
    assert said == ["orchestrator: d cannot join: its disk is full"]


TARGET = ProbeTarget(kind="program", name="sh")


def test_the_quick_check_of_who_joins() -> None:
    """As much as a launch asks for, beside a node that the job runs on."""
    disk = Disk("/", 1 << 40, 1 << 40, 0, 0, "/", "ext4", "/dev/sda1", True)
    b = node(2, "b")
    plain = facts(target=ProbeTarget(kind="program", name="sh"), disk=disk, shm=disk)
    sound = plain.replace(gpus=2)
    assert not grow.unfit(b, sound, sound)
    assert grow.unfit(b, plain, sound) == "it has 0 GPUs for 2 ranks"
    assert not grow.unfit(b, plain, plain)
    other = grow.unfit(b, plain.replace(torch="2.8.0"), plain)
    assert "torch: 2.8.0 on b, 2.9.1 on the others" in other
    assert not grow.unfit(b, plain.replace(torch=""), plain.replace(torch=""))
    full = grow.unfit(b, plain.replace(disk=disk.replace(free=0)), plain)
    assert full == "/ on b: 0 B free of 1 TiB"


def test_looks_become_rarer() -> None:
    pauses = [grow.pause_after(30.0, looks) for looks in range(1, 8)]
    assert pauses == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0]
