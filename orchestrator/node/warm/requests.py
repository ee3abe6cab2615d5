"""Answers what a head asks about the processes that wait for a job."""

from __future__ import annotations

import time

from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.warm import pairs, setting
from orchestrator.node.warm.pairs import Pair
from orchestrator.protocol.requests.warm import (
    Warm,
    WarmEnd,
    WarmEnds,
    WarmOff,
    WarmPair,
    WarmPairs,
)


@answers(Warm)
def warm(visit: Visit, request: Warm) -> WarmPairs:
    pairs = tuple(map(described, pairs_here()))
    return WarmPairs(pairs=pairs, time=time.time())


@answers(WarmOff)
def warm_off(visit: Visit, request: WarmOff) -> WarmEnds:
    return WarmEnds(ends=tuple(map(ended, pairs_here())))


def pairs_here() -> list[Pair]:
    return pairs.all_pairs()


def described(pair: Pair) -> WarmPair:
    state = pairs.ask(pair)
    pids = [pair.pid, *([state["agent"]] if type(state.get("agent")) is int else [])]
    return WarmPair(
        key=pair.key,
        since=pair.since,
        seconds_left=float(state.get("left", 0.0)),
        ready=bool(state.get("ready")),
        pids=tuple(pids),
        memory=sum(map(private_memory, pids)),
        python=pair.setting.get(setting.PYTHON, "").partition("\n")[0],
        variables={n: value for n, value in pair.setting.items() if setting.matters(n)},
        skipped=tuple(map(str, state.get("skipped", ()))),
    )


def ended(pair: Pair) -> WarmEnd:
    end = pairs.end(pair)
    return WarmEnd(key=pair.key, ended=end.ended, left=end.left)


def private_memory(pid: int) -> int:
    """Return the bytes that would be free without this process."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(row[1]) << 10 for row in rows if row[0].startswith("Private_"))
