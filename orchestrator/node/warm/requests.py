"""Answers what a head asks about the processes that wait for a job."""

from __future__ import annotations

import time

from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.warm import standbys
from orchestrator.node.warm.standbys import Standby
from orchestrator.protocol.requests.warm import (
    StandbyEnd,
    StandbyEnds,
    StandbyState,
    StandbyStates,
    Warm,
    WarmOff,
)


@answers(Warm)
def warm(visit: Visit, request: Warm) -> StandbyStates:
    return StandbyStates(standbys=tuple(map(described, standbys.find_all())), time=time.time())


@answers(WarmOff)
def warm_off(visit: Visit, request: WarmOff) -> StandbyEnds:
    ends = ((one.pid, standbys.end(one)) for one in standbys.find_all())
    return StandbyEnds(ends=tuple(StandbyEnd(pid=pid, gone=gone) for pid, gone in ends))


def described(standby: Standby) -> StandbyState:
    return StandbyState(
        key=standby.key,
        since=standby.since,
        seconds_left=max(0.0, standby.until - time.time()),
        ready=standby.ready,
        pid=standby.pid,
        memory=private_memory(standby.pid),
        python=standby.python,
    )


def private_memory(pid: int) -> int:
    """Return the bytes that would be free without this process."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(row[1]) << 10 for row in rows if row[0].startswith("Private_"))
