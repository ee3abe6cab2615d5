"""Faults of a training on several nodes, for no_seam.py and recovery.py, in a random order.

Each returns the place where it came.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

from ground import ROOT  # noqa: F401  tests/ can be imported then

from tests.end_to_end.harm import Harm, head_in_the_recovery, masters_node

# A longer cut of a link is the loss of a node.
MOMENTS = 3.0


def rank(one: Harm) -> str:
    node = one.node()
    one.kill_rank(node)
    return f"node {node}"


def torchrun(one: Harm) -> str:
    node = one.node()
    one.kill_started(node, "agent")
    return f"node {node}"


def supervisor(one: Harm) -> str:
    node = one.node()
    one.kill_started(node, "supervisor")
    return f"node {node}"


def node_cut_off(one: Harm) -> str:
    return one.cut(one.chance.randrange(1, one.nodes))


def link_for_moments(one: Harm) -> str:
    """Shorter than anybody's patience: nothing has to follow from it."""
    host, seconds = one.host(one.node()), one.chance.uniform(0.2, MOMENTS)
    one.cluster.cut(host)
    time.sleep(seconds)
    one.cluster.restore(host)
    return f"host {host}, {seconds:.1f} s"


def reboot(one: Harm) -> str:
    """Everything on a node dies at once, and the node is away for a while."""
    node = one.node()
    host = one.host(node)
    where = one.cut(node)
    one.cluster.kill_sshd(host)
    for pid in one.cluster.processes(host, "ORCHESTRATOR_"):
        with contextlib.suppress(KeyError, ProcessLookupError):
            one.cluster.kill(host, pid)
    one.repairs.insert(0, lambda: one.cluster.start_sshd(host))
    return where


def two_at_once(one: Harm) -> str:
    first, second = one.chance.sample(range(one.nodes), 2)
    one.kill_rank(first)
    one.kill_started(second, one.chance.choice(["agent", "supervisor"]))
    return f"nodes {first} and {second}"


def a_second_in_the_recovery(one: Harm) -> str:
    """As soon as a rank of the next attempt is there, or a little later, it dies too."""
    first, second = one.node(), one.node()
    before = len(one.head.record["attempts"])
    one.kill_rank(first)
    one.await_next_attempt(before)
    if one.chance.random() < 0.5:
        one.until(lambda: one.head.record["state"] == "running", "the next attempt")
        time.sleep(one.chance.uniform(0.0, 0.5))
    one.until(lambda: one.kill_rank(second), f"rank {second} of the next attempt")
    return f"nodes {first} and {second}"


def head(one: Harm) -> str:
    one.lose_head("attach", "--quiet")
    return "attach"


FAULTS: dict[str, Callable[[Harm], str]] = {
    "rank killed": rank,
    "torchrun killed": torchrun,
    "supervisor killed": supervisor,
    "node cut off": node_cut_off,
    "master's node cut off": masters_node,
    "link cut for moments": link_for_moments,
    "node rebooted": reboot,
    "two at once": two_at_once,
    "another in the recovery": a_second_in_the_recovery,
    "head killed": head,
    "head killed in the recovery": head_in_the_recovery,
}


def order(chance: random.Random, faults: int) -> list[str]:
    """Return kinds in a random order, each as often as the others or once more."""
    chosen = list[str]()
    while len(chosen) < faults:
        chosen += chance.sample([*FAULTS], len(FAULTS))
    chance.shuffle(chosen := chosen[:faults])
    return chosen
