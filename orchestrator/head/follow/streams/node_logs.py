"""The local, append-only files of the nodes' logs."""

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

# The further files per node that may be open at times: a fetched output, a log that is shown.
OPEN_WHILE_FOLLOWED = 2


class AppendOnly:
    """An append-only local file; `size` counts from the beginning of this attempt."""

    def __init__(self, path: Path, before: int = 0) -> None:
        self.path = path
        try:
            self.fd = files.open_to_append(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        self.size = os.fstat(self.fd).st_size - before
        if self.size < 0:
            os.close(self.fd)
            raise UsageError(f"{path} is shorter than its record says: it was changed")

    def append(self, data: memoryview) -> memoryview:
        """Append the data; return the rest that did not fit on the disk."""
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
    """Open the logs of all nodes; raise the limit of open files for what a head opens later."""
    logs = [NodeLogs.of(experiment, node) for node in nodes]
    what = f"the logs of {len(nodes)} nodes cannot be kept open"
    fleet.need_open_files(OPEN_WHILE_FOLLOWED * len(nodes), what)
    return logs


def log_files(experiment: Experiment, nodes: Sequence[NodeRecord]) -> list[LogFile]:
    """Return the logs of these nodes for reading."""
    return [
        LogFile(node.index, node.name, experiment.log(node), experiment.ranks(node))
        for node in nodes
    ]
