"""Lets the nodes remove what the attempts of a job shared there, once it is over for good."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.protocol.messages import Release
from orchestrator.records.experiment import JobRecord, NodeRecord

RELEASE_SECONDS = 20.0


def release(record: JobRecord, channels: Mapping[int, NodeChannel]) -> None:
    """Tell all nodes that can be told; the others forget it by themselves."""
    nodes = [node for node in record.nodes if node.index in channels]

    def tell(node: NodeRecord) -> None:
        job, index = node.first_job or record.job, node.first_node if node.first_job else node.index
        channels[node.index].ask(Release(job=job, node=index), RELEASE_SECONDS)

    fleet.everywhere(nodes, tell)
