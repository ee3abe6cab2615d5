"""Send the function of Cluster.run and its arguments to the nodes, before the job starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.common.errors import CheckFailed, StoppedEarly
from orchestrator.head.connect.channel import Declined
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.plan.model import Plan
from orchestrator.head.screen import failures
from orchestrator.head.transfer.send import send_to_all
from orchestrator.head.transfer.tree import of_files
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.transfer import HANDED, Place

CALL = "orchestrator.node.job.ranks.run_function"  # travels with what is shipped to every node


def check_python(nodes: Sequence[ProbedNode]) -> None:
    """Refuse nodes with another Python: a pickled function is bytecode of this one."""
    mine = ".".join(map(str, sys.version_info[:2]))
    others = [
        f"{node.name} ({node.facts.python_version}, {node.facts.python})"
        for node in nodes
        if node.facts.python_version.split(".")[:2] != mine.split(".")
    ]
    if others:
        raise CheckFailed(
            f"a function can be sent only to the same Python, which is {mine} here:\n"
            f"    {', '.join(others)}",
            f"name a Python {mine} that has torch: python=/path in the list, or python='/path'; "
            "or write a script, and launch that",
        )


def deliver(reached: Sequence[Reached], plan: Plan, directory: Path) -> None:
    """Send to all nodes before the first one starts, so that none waits for a slower one's data."""
    tree = of_files(directory, lambda _: 0o600)
    places = [Place(kind=HANDED, job=plan.job, node=part.index) for part in plan.nodes]
    results = send_to_all([node.channel for node in reached], places, tree)
    raise_if_stopped(results)
    failures.all_or_table([node.node for node in reached], results, "; nothing was started")


def raise_if_stopped(results: Sequence[object]) -> None:
    """Raise what a node says to a head that goes on starting a job after it was stopped."""
    for result in results:
        if isinstance(result, Declined) and result.kind == STOPPED:
            raise StoppedEarly(result.what)
