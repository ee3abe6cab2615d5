"""Answers a head's requests about the standby processes."""

from __future__ import annotations

import resource
import time

from orchestrator.node.job import processes
from orchestrator.node.server.session import ServerSession, answers
from orchestrator.node.warm import standbys
from orchestrator.protocol.requests.warm import (
    StandbyEnds,
    StandbyState,
    StandbyStates,
    Warm,
    WarmOff,
)


@answers(Warm)
def warm(session: ServerSession, request: Warm) -> StandbyStates:
    states = [
        StandbyState(
            since=each.since,
            seconds_left=max(0.0, each.until - time.time()),
            ready=each.ready,
            pid=each.pid,
            memory=private_memory(each.pid),
            python=each.python,
        )
        for each in standbys.find_standbys()
    ]
    return StandbyStates(standbys=tuple(states))


@answers(WarmOff)
def warm_off(session: ServerSession, request: WarmOff) -> StandbyEnds:
    gone = {each.pid: standbys.end_standby(each) for each in standbys.find_standbys()}
    ended = tuple(pid for pid in gone if gone[pid])
    return StandbyEnds(ended=ended, left=tuple(pid for pid in gone if not gone[pid]))


def private_memory(pid: int) -> int:
    """Return the resident memory that no file backs, in bytes; 0 if the process is gone."""
    _, resident, shared, *_ = [
        *map(int, processes.file_contents(f"/proc/{pid}/statm").split()),
        0,
        0,
        0,
    ]
    return (resident - shared) * resource.getpagesize()
