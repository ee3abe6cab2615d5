"""The containers in which jobs of this head run, or have left something, on nodes of a list.

One that the list names (wrap=) is known to every command. One that was given to a launch, by --wrap
or in its config, is known from that launch's record: a command that is about all of a node looks
into it, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.common.errors import UsageError
from orchestrator.common.text import parse_seconds
from orchestrator.config.launch import Where
from orchestrator.head.nodes.environment import chosen
from orchestrator.head.nodes.node_list import Node
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord


def of_nodes(
    nodes: Sequence[Node], where: Where, matters: Callable[[JobRecord], bool]
) -> list[Node]:
    """Return these nodes as the launches of such jobs entered them, where the list does not."""
    listed = {(node.host, node.user, node.port): node for node in nodes}
    found: dict[object, Node] = {}
    for experiment in experiments.every(where.experiments, trusted=where.trust_record):
        record = trusted_record(experiment)
        if record is None or not matters(record):
            continue
        for part in (*record.nodes, *record.spares):
            key = (part.host, part.user, part.port)
            node, wrap = listed.get(key), chosen(part.wrap)
            if node is not None and wrap not in (None, chosen(node.wrap)):
                inside = replace(node, python=part.python, activate=part.activate, wrap=wrap)
                found[key, wrap] = inside
    return list(found.values())


def trusted_record(experiment: Experiment) -> JobRecord | None:
    """Return its record, if this login launched it: how a node is entered is a command there."""
    with contextlib.suppress(UsageError):
        record = experiment.read_record()
        if any(chosen(part.wrap) for part in (*record.nodes, *record.spares)):
            experiment.check_launched(record)
            return record
    return None


def runs(record: JobRecord) -> bool:
    return not record.over


def may_be_warm(record: JobRecord) -> bool:
    """Return True if a job runs, or may have left warm processes that still wait."""
    warm = record.launch.warm
    if warm is None or record.ended is None:
        return warm is not None
    return record.ended + parse_seconds("launch.warm", warm) > time.time()
