"""Harm that is done to a running job of several nodes, and what has to be put right afterwards.

Each node has one rank, with its number. A seed repeats the target, place and time of the harm.
"""

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clusters.netns import NetnsCluster
from tests.launching import Command, Head

# Waiting for the next good step takes long on a busy machine.
PATIENCE = 180.0


class Seam(AssertionError):
    """The faults left a trace, or the job did not go on."""


class Harm:
    """A job that runs on some of a cluster's hosts, and the chance by which harm comes to it."""

    command: Command

    def __init__(self, cluster: NetnsCluster, directory: Path, seed: int, nodes: int) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.head = Head(cluster, directory)
        self.chance = random.Random(seed)
        self.repairs: list[Callable[[], object]] = []
        # The nodes where something was ended or cut that the training cannot do without.
        self.victims: list[int] = []

    def repair(self) -> None:
        while self.repairs:
            self.repairs.pop()()

    def until(self, condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while not (self.head.experiments and condition()):
            if self.command.process.poll() not in (None, 0):
                self.command.finish(10.0)
                raise Seam(f"the head ended before {what}:\n{self.command.text}")
            if time.monotonic() > deadline:
                record = json.dumps(self.head.record, indent=1)
                raise Seam(f"{what} did not come:\n{record}")
            time.sleep(0.05)

    @property
    def attempts(self) -> int:
        return len(self.head.record["attempts"])

    def await_next_attempt(self, before: int) -> None:
        self.until(lambda: self.attempts > before, "the end of the attempt")

    # -- whom it may meet --------------------------------------------------------------------

    def node(self) -> int:
        return self.chance.randrange(self.nodes)

    def host(self, node: int) -> int:
        return self.cluster.addresses.index(self.head.record["nodes"][node]["address"])

    def kill_rank(self, node: int) -> bool:
        return self.kill(node, ["pkill", "-KILL", "-x", f"rank{node}"])

    def kill_started(self, node: int, what: str) -> bool:
        """Kill the torchrun (`agent`) or the supervisor of a node."""
        return self.kill(node, ["kill", "-KILL", str(self.started(node)[what])])

    def started(self, node: int) -> dict[str, Any]:
        """Return the event of a node's supervisor after it had started torchrun."""
        record = self.head.record
        run = (record["job"], str(record["nodes"][node]["part"]), str(record["attempt"]))
        events = self.cluster.run_home(self.host(node)).joinpath("runs", *run, "events.jsonl")
        for line in events.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event: dict[str, Any] = json.loads(line.strip("\0"))
                if event.get("event") == "started":
                    return event
        raise AssertionError(f"node {node} has started nothing")

    def kill(self, node: int, words: list[str]) -> bool:
        try:
            self.cluster.exec(self.host(node), words)
        except AssertionError:
            # The process has just ended by itself.
            return False
        self.victims.append(node)
        return True

    def cut(self, node: int) -> str:
        """Cut a node off until the training has gone on without it."""
        host = self.host(node)
        self.cluster.cut(host)
        self.victims.append(node)
        self.repairs.append(lambda: self.cluster.restore(host))
        return f"node {node}, host {host}"

    def lose_head(self, *words: str) -> None:
        self.command.process.kill()
        self.command.process.wait()
        self.command = self.head.command("orchestrator", *words)


# -- two faults: each returns the place where it came --------------------------------------------


def masters_node(one: Harm) -> str:
    return one.cut(0)


def head_in_the_recovery(one: Harm) -> str:
    node, before = one.node(), len(one.head.record["attempts"])
    one.kill_rank(node)
    if one.chance.random() < 0.7:
        one.await_next_attempt(before)
    time.sleep(one.chance.uniform(0.0, 0.3))
    one.lose_head("attach", "--quiet")
    return f"node {node}"
