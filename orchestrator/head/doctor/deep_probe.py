"""Asks a node for a closer look at itself, for the doctor: with commands, so it takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.head.connect.channel import NodeChannel
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.messages import Examine

PATIENCE = 90.0  # longer than the longest limit of a part, which is that of importing torch


def ask(channel: NodeChannel, workdir: str, script: str = "", parts: Sequence[str] = ()) -> Checkup:
    """Ask a node for its checkup; the parts are gpus, xids, code, torch and names, or all."""
    request = Examine(workdir=workdir, script=script, parts=tuple(parts))
    return channel.ask(request, PATIENCE).checkup
