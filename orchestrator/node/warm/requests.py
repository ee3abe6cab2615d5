"""Answers what a head asks about the processes that wait for a job."""

from __future__ import annotations

import time

from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.warm import listing
from orchestrator.protocol.requests.warm import Warm, WarmEnds, WarmOff, WarmPairs


@answers(Warm)
def warm(visit: Visit, request: Warm) -> WarmPairs:
    pairs = tuple(map(listing.described, listing.pairs_here()))
    return WarmPairs(pairs=pairs, time=time.time())


@answers(WarmOff)
def warm_off(visit: Visit, request: WarmOff) -> WarmEnds:
    return WarmEnds(ends=tuple(map(listing.ended, listing.pairs_here())))
