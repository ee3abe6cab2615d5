"""Writes one line between the attempts of a job into each log, and notes where they begin."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from orchestrator.head.follow.node_logs import NodeLogs
from orchestrator.head.screen.log_reader import NO_RANK
from orchestrator.records.experiment import Experiment, NodeRecord


def begin(experiment: Experiment, node: NodeRecord, line: str) -> NodeRecord:
    """Write the line into a node's log; return the record with what its files hold before it."""
    logs = NodeLogs.of(experiment, node)
    try:
        own_line = "" if ends_whole(logs.text.path) else "\n"
        text = f"{own_line}orchestrator: {line}\n".encode()
        size, ranks = logs.text.size, logs.ranks.size
        rest = logs.ranks.append(memoryview(f"{size} {NO_RANK}\n".encode()))
        if rest or logs.text.append(memoryview(text)):  # a full disk: nothing of it, then
            os.ftruncate(logs.text.fd, size)
            os.ftruncate(logs.ranks.fd, ranks)
    finally:
        logs.text.close()
        logs.ranks.close()
    sizes = [path.stat().st_size for path in (logs.text.path, logs.ranks.path)]
    return replace(node, log_before=sizes[0], ranks_before=sizes[1])


def ends_whole(path: Path) -> bool:
    """Tell whether a file ends with the end of a line, or is empty."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")
