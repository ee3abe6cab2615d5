"""Lets the nodes remove what the attempts of a job shared there, once it is over for good."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import ask_once
from orchestrator.head.connect.transport import Transport
from orchestrator.protocol.requests.start import Release
from orchestrator.records.experiment import JobRecord, NodeRecord

RELEASE_SECONDS = 20.0
SPARE_SECONDS = 5.0  # that the end of a job may wait for its spares


def release(record: JobRecord, channels: Mapping[int, NodeChannel], transport: Transport) -> None:
    """Tell all nodes that can be told; the others forget it by themselves."""
    nodes = [node for node in record.nodes if node.index in channels]
    standing_by = [node for node in record.spares if node.state == "standing by"]

    def order(node: NodeRecord) -> Release:
        job, part = record.first_part(node)
        return Release(job=job, node=part)

    def tell_spare(node: NodeRecord) -> None:
        ask_once(transport, node, order(node), RELEASE_SECONDS)

    others = threading.Thread(target=fleet.everywhere, args=(standing_by, tell_spare), daemon=True)
    if standing_by:
        others.start()
    fleet.everywhere(nodes, lambda node: channels[node.index].ask(order(node), RELEASE_SECONDS))
    if standing_by:
        others.join(SPARE_SECONDS)
