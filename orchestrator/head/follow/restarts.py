"""Decide if a job is restarted, how often and on which nodes. Pure functions.

Transient failures (a lost node, a killed rank, a hang, a broken link) are retried as often as the
user allows. So is a full disk while a spare can replace the node. A failure of the program is
retried once, as the same failure at the same step will occur again. A job ends after three attempts
without progress, with the cause of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.common.errors import EXIT_NO_RESTART
from orchestrator.head.follow.failure_kinds import is_of_machine
from orchestrator.records.experiment import (
    NOT_STARTED,
    RESTARTING,
    Attempt,
    JobRecord,
    NodeRecord,
)
from orchestrator.records.outcome import JobVerdict

# Kinds of failures (head/follow/failure_kinds.py) that another start may not meet again.
PASSING = {
    "lost": "the node was lost",
    "hang": "it hung",
    "link": "a connection between ranks broke",
    "communication": "the ranks lost each other",
    "signal": "a rank was killed",
    "gpu_fault": "a GPU failed",
    "out_of_memory": "the host had no memory left",
    "shared_memory": "/dev/shm was full",
    "no_processes": "the node allowed no more processes",
    "supervisor": "a supervisor was killed",
    "torchrun": "torchrun failed",
    "start": "it could not be started",
}
# A full disk is not transient: only a user can free space.
FULL = "disk_full"
UNABLE = {
    FULL: "has no space left on a disk",
    "gpu_fault": "has a broken GPU",
}
# This part of a path names a node's snapshot. It is removed to compare failures of two nodes.
SNAPSHOT = re.compile(r"/\S*?/code/snapshots/[^/\s]+/")
# A node that this many verdicts named is replaced by a spare.
MOST_FAILURES = 3
# The most characters shown of the reason why an attempt could not be started.
MOST_WORDS = 150
# The job ends after this many attempts in a row without progress.
MOST_IDLE = 3
# An attempt with unknown steps that ran this long counts as progress.
ALIVE_SECONDS = 120.0


@dataclass(frozen=True)
class Decision:
    """The decision if another attempt follows, its reason, and the verdict to record."""

    restart: bool
    why: str
    verdict: JobVerdict | None


def node_bounds(record: JobRecord) -> tuple[int, int]:
    """Return the least and the most nodes that the job may have."""
    count = len(record.attempts[0].nodes if record.attempts else record.nodes)
    least, most = record.launch.node_counts or (count, count)
    return min(least, count), most


def failures_of_node(record: JobRecord, node: NodeRecord) -> str:
    """Return what earlier attempts say against a node as a clause after its name, else ""."""
    for attempt in record.latest:
        verdict = attempt.verdict or JobVerdict()
        others = [attempt.nodes[one.node] for one in verdict.also if one.node is not None]
        if verdict.kind in UNABLE and verdict.node_name == node.name:
            return UNABLE[verdict.kind]
        never = attempt.never_began and node.state == NOT_STARTED
        if never and node.name in (verdict.node_name, *others):
            return "could not do its part of the start"
    blamed = sum(
        verdict.node_name == node.name and is_of_machine(verdict.kind, verdict.message)
        for verdict in (attempt.verdict or JobVerdict() for attempt in record.attempts)
    )
    return f"was named as the cause of {blamed} failures" if blamed >= MOST_FAILURES else ""


def record_after(record: JobRecord, attempt: Attempt, *, stopped: bool = False) -> JobRecord:
    """Return the record with this latest attempt and the decision on the next one.

    `stopped`: the user has stopped the job.
    """
    attempts = [*record.attempts, attempt]
    decision = decide_restart(attempts, record.launch.max_restarts, spares=bool(record.spares))
    if stopped:
        decision = Decision(restart=False, why="the user stopped it", verdict=record.verdict)
    attempts[-1] = replace(attempt, restarted=decision.restart, why=decision.why)
    if decision.restart:
        record = replace(record, state=RESTARTING, exit_code=None, ended=None)
    return replace(record, attempts=attempts, verdict=decision.verdict)


# -- how an attempt ended ---------------------------------------------------------------------


def ended_attempt(record: JobRecord, step: int | None, printed: int | None) -> Attempt:
    """Return the ended attempt of this record, with its last measured and printed steps."""
    codes = (rank.code for node in record.nodes for rank in node.ranks.values())
    earlier = record.attempts
    begun = [] if any(node.state == NOT_STARTED for node in record.nodes) else record.nodes
    return Attempt(
        number=record.attempt,
        started=earlier[-1].ended if earlier else record.started,
        ended=record.ended or 0.0,
        state=record.state,
        exit_code=record.exit_code,
        verdict=record.verdict,
        nodes=[node.name for node in record.nodes],
        codes=sorted({code for code in codes if code is not None}),
        step=step,
        printed=printed,
        ran=seconds_of_ranks(record),
        clock=next((node.clock for node in record.nodes), 0.0),
        log_before=[node.log_before for node in begun],
    )


def seconds_of_ranks(record: JobRecord) -> float:
    """Return the seconds for which ranks ran in an attempt that has ended, 0 if none began.

    An attempt begins with the end of the one before, and may wait for a node for minutes.
    """
    began = [node.times["ranks"] for node in record.nodes if "ranks" in node.times]
    return max(0.0, (record.ended or 0.0) - max(began)) if began else 0.0


# -- what follows a failure -------------------------------------------------------------------


def decide_restart(attempts: Sequence[Attempt], allowed: int, *, spares: bool = False) -> Decision:
    """Return the decision after the last of these attempts, with `allowed` restarts in all.

    `spares`: True if spare nodes stand by.
    """
    last = attempts[-1]

    def end(reason: str, verdict: JobVerdict | None = last.verdict) -> Decision:
        return Decision(False, reason, verdict)

    if last.state not in ("failed", "lost"):
        return end(f"it is {last.state}")
    if not allowed:
        return end("no restarts are allowed")
    if EXIT_NO_RESTART in last.codes:
        return end(f"a rank ended with {EXIT_NO_RESTART}: the program wants no restart")
    passing = is_passing(last) or (spares and kind_of(last) == FULL)
    if not passing and any(is_same(last, other) for other in attempts[:-1]):
        return end("the program failed in the same way before")
    idle = without_progress(attempts)
    if len(idle) >= MOST_IDLE:
        first = idle[0]
        others = [one for one in idle if restart_reason(one) != restart_reason(first)]
        parts = [
            f"{len(idle)} attempts in a row got nowhere",
            f"the cause is that of attempt {first.number}",
            *(f"attempt {other.number}: {restart_reason(other)}" for other in others),
        ]
        return end("; ".join(parts), first.verdict)
    if len(attempts) > allowed:
        return end(f"all {allowed} restarts are used up" if allowed > 1 else "its restart is used")
    return Decision(True, restart_reason(last), None)


def kind_of(attempt: Attempt) -> str:
    return attempt.verdict.kind if attempt.verdict else ""


def is_passing(attempt: Attempt) -> bool:
    """Return True if the failure is transient: a restart may not meet it again."""
    return attempt.state == "lost" or attempt.never_began or kind_of(attempt) in PASSING


def restart_reason(attempt: Attempt) -> str:
    """Return a short reason for the line between two attempts."""
    verdict = attempt.verdict or JobVerdict()
    what = PASSING.get(kind_of(attempt), "a rank failed")
    node, rank = verdict.node, verdict.rank
    if kind_of(attempt) == "lost" and node is not None:
        return f"node {node} lost"
    if kind_of(attempt) == "start" or attempt.never_began:
        what = PASSING["start"]
        reason = verdict.message.partition("\n")[0]
        return f"{what}: {reason[:MOST_WORDS]}" if reason else what
    if rank is not None:
        return f"{what}: rank {rank} on node {node}"
    return what if node is None else f"{what}: node {node}"


def is_same(one: Attempt, other: Attempt) -> bool:
    """Return True if two attempts failed alike, at the same step if steps are known.

    A full disk counts as the same failure only on the same node.
    """

    def signature(attempt: Attempt) -> tuple[object, ...]:
        verdict = attempt.verdict or JobVerdict()
        message = verdict.message.partition("\n")[0]
        where, message = (SNAPSHOT.sub("", text) for text in (verdict.where, message))
        node = verdict.node_name if verdict.kind == FULL else ""
        return verdict.kind, where, message, attempt.step, node

    return signature(one) == signature(other)


def without_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the latest attempts in a row that got no further than those before."""
    idle: list[Attempt] = []
    for number, attempt in enumerate(attempts):
        earlier = attempts[:number]
        before = max((one.step or 0 for one in earlier), default=0)
        moved = attempt.alive >= ALIVE_SECONDS if attempt.step is None else attempt.step > before
        # Printed steps can show progress, but not the lack of it: they may begin again in each
        # epoch.
        printed = max((one.printed or 0 for one in earlier), default=0)
        moved = moved or (attempt.step is None and (attempt.printed or 0) > printed)
        idle = [] if moved else [*idle, attempt]
    return idle
