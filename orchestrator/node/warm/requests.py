"""Answers what a head asks about the processes that wait for a job."""

from __future__ import annotations

import os
import resource
import time

from orchestrator.node.job import processes
from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.warm import standbys
from orchestrator.node.warm.standbys import Standby
from orchestrator.protocol.requests.warm import (
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
    gone = {each.pid: standbys.end(each) for each in standbys.find_all()}
    ended = tuple(pid for pid in gone if gone[pid])
    return StandbyEnds(ended=ended, left=tuple(pid for pid in gone if not gone[pid]))


def described(standby: Standby) -> StandbyState:
    return StandbyState(
        key=os.path.basename(standby.directory),
        since=standby.since,
        seconds_left=max(0.0, standby.until - time.time()),
        ready=standby.ready,
        pid=standby.pid,
        memory=private_memory(standby.pid),
        python=standby.python,
    )


def private_memory(pid: int) -> int:
    """Return the bytes of memory that no file of the disk stands for; 0 if it is gone."""
    _, resident, shared, *_ = [*map(int, processes.contents(f"/proc/{pid}/statm").split()), 0, 0, 0]
    return (resident - shared) * resource.getpagesize()
