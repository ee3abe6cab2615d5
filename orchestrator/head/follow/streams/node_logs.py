"""The local files of the nodes' logs, which only grow."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files
from orchestrator.common.errors import NodeError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.screen.log_reader import LogFile
from orchestrator.records.experiment import Experiment, NodeRecord

OPEN_WHILE_FOLLOWED = 2  # files a node, now and then: an output that comes home, a log to show


class AppendOnly:
    """A local file that only grows; `size` counts from where this attempt of the job begins."""

    def __init__(self, path: Path, before: int = 0) -> None:
        self.path = path
        try:
            self.fd = files.open_to_append(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        self.size = os.fstat(self.fd).st_size - before
        if self.size < 0:
            os.close(self.fd)
            raise UsageError(f"{path} is shorter than its record says: somebody has changed it")

    def append(self, data: memoryview) -> memoryview:
        """Write the data; return what did not fit on the disk."""
        while data:
            try:
                done = os.write(self.fd, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise NodeError(f"{self.path}: {error.strerror}") from error
                break
            self.size += done
            data = data[done:]
        return data

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class NodeLogs:
    """The local files of one node's log, open for as long as the job is followed."""

    text: AppendOnly
    ranks: AppendOnly

    @staticmethod
    def of(experiment: Experiment, node: NodeRecord) -> NodeLogs:
        text = AppendOnly(experiment.log(node), node.log_before)
        return NodeLogs(text, AppendOnly(experiment.ranks(node), node.ranks_before))


def open_logs(experiment: Experiment, nodes: Sequence[NodeRecord]) -> list[NodeLogs]:
    """Open the files of all nodes, with room for what else a head opens while it follows them."""
    logs = [NodeLogs.of(experiment, node) for node in nodes]
    what = f"the logs of {len(nodes)} nodes cannot be kept open"
    fleet.need_room(OPEN_WHILE_FOLLOWED * len(nodes), what)
    return logs


def log_files(experiment: Experiment, nodes: Sequence[NodeRecord]) -> list[LogFile]:
    """Return the logs of these nodes, to be read."""
    return [
        LogFile(node.index, node.name, experiment.log(node), experiment.ranks(node))
        for node in nodes
    ]
