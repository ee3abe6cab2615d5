"""Before the next attempt: says what the program has saved on some of its nodes only.

Where nodes share no disk, ranks on the others do not find it, and would begin anew beside those
that go on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

from orchestrator.errors import OrchestratorError
from orchestrator.head.connect import fleet
from orchestrator.head.follow.failure_kinds import PARTS
from orchestrator.head.restart.gather import Gathered, Say
from orchestrator.head.screen.output import printable
from orchestrator.protocol.messages import AskSaved, Saved
from orchestrator.records.experiment import JobRecord

ANSWER_SECONDS = 10.0
LAG_SECONDS = 70.0  # NFS keeps attributes for 60 s at most, unless it is told otherwise
LOOK_SECONDS = 1.0


def warn(record: JobRecord, gathered: Gathered, say: Say, stopped: Callable[[], None]) -> None:
    """Name files that not all nodes have; a node that does not answer is not waited for.

    On one disk that they share it is a matter of time: until each sees what the others wrote.
    """
    names, shared = look(record, gathered)
    if shared and (behind := lagging(names)):
        say(f"not every node sees {printable(behind)} yet: a network disk lags behind; waiting"
            f" for it, {LAG_SECONDS:.0f} s at most")  # fmt: skip
        deadline = time.monotonic() + LAG_SECONDS
        while shared and behind and time.monotonic() < deadline:
            stopped()
            time.sleep(LOOK_SECONDS)
            names, shared = look(record, gathered)
            behind = lagging(names)
    if found := lone(names):
        say(f"WARNING: {printable(found)}")


def look(record: JobRecord, gathered: Gathered) -> tuple[dict[int, tuple[str, ...]], bool]:
    """Ask each node what it sees; also return whether all of them look at one disk."""
    parts = [record.first_part(node) for node in gathered.nodes]
    asked = [
        (channel, AskSaved(job=job, node=part))
        for channel, (job, part) in zip(gathered.channels, parts, strict=True)
    ]
    answers = fleet.everywhere(asked, lambda pair: pair[0].ask(pair[1], ANSWER_SECONDS))
    # A node that is new to the job knows nothing of it, and has none of its files.
    told = [Saved(names=()) if isinstance(one, OrchestratorError) else one for one in answers]
    return {n: one.names for n, one in enumerate(told)}, all(one.shared for one in told)


def lagging(names: Mapping[int, Sequence[str]]) -> str:
    """Return the first file that only some nodes see, of one disk; or nothing."""
    views = [set(own) for own in names.values()]
    return min(views[0].union(*views) - views[0].intersection(*views), default="")


def lone(names: Mapping[int, Sequence[str]]) -> str:
    """Say what only some nodes have; files of which each node has its own differ in numbers."""
    owners: dict[str, set[int]] = {}
    firsts: dict[str, str] = {}
    for node, own in names.items():
        for name in own:
            key = re.sub(r"[0-9]+", "#", name)
            owners.setdefault(key, set()).add(node)
            firsts.setdefault(key, name)
    missing = [key for key, nodes in owners.items() if len(nodes) < len(names)]
    if not missing:
        return ""
    for key in missing:
        directory, _, name = firsts[key].rpartition("/")
        if name == ".metadata":
            return f"each node has its own part alone of {directory or '.'}: {PARTS}"
    more = f" and {len(missing) - 1} more" if missing[1:] else ""
    where = ", ".join(f"node {node}" for node in sorted(owners[missing[0]]))
    return (
        f"saved on {where} only: {firsts[missing[0]]}{more}; ranks on other nodes find nothing"
        " there, and orchestrator.distributed.copy_to_nodes(path) brings what rank 0 saves to all"
        " nodes"
    )
