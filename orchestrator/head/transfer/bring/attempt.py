"""Before the next attempt: bring to its nodes what the job's ranks left on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.transport import Transport
from orchestrator.head.transfer.bring.partner import Partner
from orchestrator.head.transfer.bring.resume import bring_to_attempt
from orchestrator.head.transfer.bring.saved import bring_saved
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord


def bring(
    experiment: Experiment,
    record: JobRecord,
    nodes: Sequence[NodeRecord],
    channels: Sequence[NodeChannel],
    spares: Sequence[NodeRecord],
    transport: Transport,
    say: Callable[[str], None],
    stopped: Callable[[], None],
) -> None:
    """Bring the newest checkpoint, and what a program of the user's wrote.

    It needs the nodes of the next attempt with an open channel to each, those that the attempt
    leaves, the record with all attempts so far, and `stopped`, which raises an error when the user
    has stopped the job. CheckFailed says why the attempt must not begin.
    """
    own = [
        Partner(node.name, channel, address=node.address, login=node, job=record.first_part(node))
        for node, channel in zip(nodes, channels, strict=True)
    ]
    left = [Partner(node.name, address=node.address, login=node) for node in spares]
    bring_to_attempt(experiment, record, own, left, transport, say, stopped)
    bring_saved(experiment, record, own, say, stopped)
