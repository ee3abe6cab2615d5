"""Send the function of Cluster.run and its arguments to the nodes, before the job starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import CheckFailed
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.plan.model import NodePlan, Plan
from orchestrator.protocol.messages import Parcel

CALL = "orchestrator.node.job.run_function"  # travels with what is shipped to every node
PIECE = 4 << 20  # until the node is heard of
STEP = 1 << 18  # paramiko copies what is left after every 32 KB: 1.7 of 7.6 s with larger ones
PIECE_SECONDS = 60.0


def check_python(reached: Sequence[Reached]) -> None:
    """Refuse nodes with another Python: a pickled function is bytecode of this one."""
    mine = ".".join(map(str, sys.version_info[:2]))
    others = [
        f"{one.node.name} ({one.facts.python_version}, {one.facts.python})"
        for one in reached
        if one.facts.python_version.split(".")[:2] != mine.split(".")
    ]
    if others:
        raise CheckFailed(
            f"a function can be sent only to the same Python, which is {mine} here:\n"
            f"    {', '.join(others)}",
            f"name a Python {mine} that has torch: python=/path in the list, or python='/path'; "
            "or write a script, and launch that",
        )


def deliver(reached: Sequence[Reached], made: Plan, parcel: Path) -> None:
    """Send to all nodes before the first one starts, so that none waits for a slower one's data."""

    def one(pair: tuple[Reached, NodePlan]) -> None:
        send(pair[0].channel, made.job, pair[1].index, parcel)

    results = fleet.everywhere(list(zip(reached, made.nodes, strict=True)), one)
    fleet.all_or_table([one.node for one in reached], results, "; nothing was started")


def send(channel: NodeChannel, job: str, node: int, parcel: Path) -> None:
    """Send every file of a directory, in pieces."""
    for path in sorted(parcel.iterdir()):
        with path.open("rb") as file:
            while data := file.read(PIECE):
                for at in range(0, len(data), STEP):
                    channel.put(data[at : at + STEP], PIECE_SECONDS)
                channel.ask(Parcel(job=job, node=node, name=path.name), PIECE_SECONDS)
