"""Brings the last lines of a node that was lost home, once it answers again.

When its links were cut, it had written lines that were not on their way yet. They stand in its own
log, behind those that are here; that attempt is not followed any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.common.text import Say, size
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import Declined, NodeChannel, read_message
from orchestrator.head.follow.streams.node_logs import NodeLogs
from orchestrator.protocol.frames import JSON, LOG, OFFSET, RANKS
from orchestrator.protocol.requests.follow import Follow
from orchestrator.protocol.requests.request import SupervisorGone
from orchestrator.protocol.timing import HEAD_PATIENCE_SECONDS
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

NO_EVENTS = 1 << 62  # from there on, which is nothing


def bring(
    experiment: Experiment,
    record: JobRecord,
    nodes: Sequence[NodeRecord],
    channel: Callable[[NodeRecord], NodeChannel],
    say: Say,
) -> None:
    """Bring those of nodes that were lost; say what came, and what is lost.

    Raises NodeError for a node that answers, and breaks off: a later try finds what is lacking.
    """
    parts = [(node, part) for node in nodes if (part := last_part(record, node)) is not None]

    def go(item: tuple[NodeRecord, tuple[str, NodeRecord]]) -> int:
        node, (job, there) = item
        return rest_of(channel(node), experiment, job, there)

    for (node, (job, _)), came in zip(parts, fleet.everywhere(parts, go), strict=True):
        what = f"{node.name}'s log" + (f" in {job}" if record.attempts else "")
        if isinstance(came, OrchestratorError):
            say(f"the last seconds of {what} are not here: {came.what}")
            if not isinstance(came, Declined):
                raise NodeError(f"{node.name}: {came.what}", came.fix, names=[node.name])
        elif came:
            say(f"the last {size(came)} of {what}, which {node.name} alone had, are here now")


def last_part(record: JobRecord, node: NodeRecord) -> tuple[str, NodeRecord] | None:
    """Return the last job that this machine had a part in, and its number and logs in that."""
    if not record.attempts:
        return record.job, node
    for attempt in reversed(record.attempts):
        if node.name in attempt.nodes and attempt.log_before:
            at = attempt.nodes.index(node.name)
            text, ranks = attempt.log_before[at], attempt.ranks_before[at]
            return attempt.job, replace(node, index=at, log_before=text, ranks_before=ranks)
    return None


def rest_of(channel: NodeChannel, experiment: Experiment, job: str, node: NodeRecord) -> int:
    """Append what a node has of its log beyond what is here; return how many bytes came."""
    logs = NodeLogs.of(experiment, node)
    try:
        before = logs.text.size
        request = Follow(job=job, node=node.index, log=before, ranks=logs.ranks.size,
                         events=NO_EVENTS)  # fmt: skip
        channel.ask(request, HEAD_PATIENCE_SECONDS)
        silence = f"no word for {HEAD_PATIENCE_SECONDS:.0f} s"
        while True:
            deadline = time.monotonic() + HEAD_PATIENCE_SECONDS
            kind, count = channel.header(deadline, silence)
            data = channel.exactly(count, deadline, silence)
            if kind in (LOG, RANKS):
                file = logs.text if kind == LOG else logs.ranks
                (offset,) = OFFSET.unpack(data[: OFFSET.size])
                if offset != file.size or file.append(memoryview(data)[OFFSET.size :]):
                    raise NodeError(f"{file.path} does not go on here as it does there")
            elif kind == JSON and isinstance(read_message(data), SupervisorGone):
                return logs.text.size - before
    finally:
        logs.text.close()
        logs.ranks.close()
