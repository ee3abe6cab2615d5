"""Race for GPUs: users on the same nodes, some of whom are killed; nothing is ever held twice.

    python scripts/bench/claims.py [--rounds 1000] [--users 8] [--nodes 8] [--seed 1]

Every user is a process that launches again and again: some slots on some of the nodes, through the
queue or at once. It takes them by the code of the head and of the nodes; only the connections
between these two are left out. One in ten holders, and one in ten who wait, is killed with SIGKILL.
Prints what happened, and exits with 1 if a slot had two holders, or none was given for 20 seconds.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from orchestrator.common.errors import NodeError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.start import claims
from orchestrator.head.start.claims import Occupied, wait_for_turn
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import resolve_request
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.start.claims import Claims
from orchestrator.node.start.lock_table import LockTable
from orchestrator.protocol.requests.claims import RUNNING

# The slots of each node.
SLOTS = 4
STUCK_SECONDS = 20.0
# The share of holders that are killed, and of those who wait.
KILLED = 0.1


class Machine:
    """A node as a head has it: its channel is the server's own code, in this process."""

    def __init__(self, place: Path) -> None:
        self.session = ServerSession()
        self.session.of(Claims).lock_table = LockTable(str(place))
        name = place.name
        self.node = SimpleNamespace(name=name, slots=SLOTS, line=1)
        self.facts = SimpleNamespace(boot=name, network=0, gpus=0, clock_offset=0.0)
        self.probed = SimpleNamespace(node=self.node, facts=self.facts, name=name)
        self.channel = SimpleNamespace(
            ask=self.ask, post=lambda _: 0, wait_for=self.wait_for, beat=lambda: None
        )

    def ask(self, request: Any, timeout: float) -> Any:
        try:
            return self.session.answer(request)
        except Refusal as refusal:
            raise NodeError(str(refusal)) from refusal

    def wait_for(self, number: int, request: Any, timeout: float, since: float) -> Any:
        return self.ask(request, timeout)


def request_of(dice: random.Random, queue: bool) -> LaunchRequest:
    request = resolve_request(LaunchArguments(program=("true",)), ["master_launch"])
    launch = replace(
        request.config.launch,
        claim="all",
        queue=queue,
        nproc=dice.randint(1, SLOTS),
    )
    return replace(request, begun=time.time(), config=replace(request.config, launch=launch))


def start(request: LaunchRequest, nodes: Nodes) -> None:
    wanted = [
        claims.NodeClaim(node.node.name, node.channel, claims.devices_of(request, node))
        for node in nodes.reached
    ]
    taken = claims.hold_gpus(wanted)
    if taken.missing:
        raise Occupied(taken.missing, len(nodes.reached))


def never() -> tuple[LaunchRequest, Nodes]:
    raise AssertionError("a node is lost, and none of these can be")


def user(places: list[Path], seed: int, told: int) -> None:
    """Launch until killed; write a line for each thing that happens."""
    dice = random.Random(seed)
    while True:
        some = dice.sample(places, dice.randint(1, len(places)))
        queue = dice.random() < 0.7
        request = request_of(dice, queue)
        machines = cast(Any, tuple(Machine(place) for place in some))
        nodes = Nodes(cast(Any, None), cast(Any, None), machines)
        began, dies = time.monotonic(), dice.random() < KILLED

        try:
            if queue:
                if dice.random() < KILLED:
                    # It is killed in the middle of its wait.
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, dice.random() * 0.2)
                wait_for_turn(request, nodes, never, start)
                signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                start(request, nodes)
        except Occupied:
            os.write(told, b"refused 0\n")
            leave(machines)
            continue
        marks = [mark(machine, place) for machine, place in zip(machines, some, strict=True)]
        words = "doubled" if not all(marks) else "got"
        os.write(told, f"{words} {time.monotonic() - began:.3f}\n".encode())
        for machine in machines:
            holding = machine.session.of(Claims)
            holding.enter(holding.entry.replace(state=RUNNING))
        time.sleep(dice.random() * 0.02)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        for names in marks:
            for name in names or ():
                name.unlink()
        leave(machines)


def leave(machines: Any) -> None:
    for machine in machines:
        machine.session.leave()


def mark(machine: Any, place: Path) -> list[Path] | None:
    """Leave a mark for each slot that is held; None where a living process has one there."""
    names = []
    for device in machine.session.of(Claims).held:
        name = place.parent / f"{place.name}-{device.key}.mark"
        try:
            name.symlink_to(str(os.getpid()))
        except FileExistsError:
            if lives(int(name.readlink().name)):
                return None
            name.unlink()
            name.symlink_to(str(os.getpid()))
        names.append(name)
    return names


def lives(pid: int) -> bool:
    """Return True if a process can still hold something, which a zombie cannot."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX" and pid != os.getpid()


def race(rounds: int, users: int, nodes: int, seed: int, directory: Path) -> int:
    places = [directory / f"node{at}" for at in range(nodes)]
    dice, counted, waits = random.Random(seed), Counter[str](), list[float]()
    reading, writing = os.pipe()
    alive: set[int] = set()
    rest = b""
    began = time.monotonic()
    while counted["got"] + counted["doubled"] < rounds:
        while len(alive) < users:
            child = os.fork()
            if not child:
                user(places, dice.randint(0, 1 << 30) + os.getpid(), writing)
            alive.add(child)
            dice.random()
        if not select.select([reading], [], [], STUCK_SECONDS)[0]:
            counted["stuck"] += 1
            break
        *lines, rest = (rest + os.read(reading, 1 << 16)).split(b"\n")
        for line in lines:
            what, seconds = line.decode().split()
            counted[what] += 1
            waits += [float(seconds)] if what == "got" else []
        while (ended := os.waitpid(-1, os.WNOHANG) if alive else (0, 0))[0]:
            alive.discard(ended[0])
            counted["killed"] += 1
    for child in alive:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    waits.sort()
    freed = free_seconds(places)
    print(
        f"{users} users, {nodes} nodes of {SLOTS} slots, {time.monotonic() - began:.0f} s:"
        f" {counted['got']} got all they wanted, {counted['refused']} were refused,"
        f" {counted['killed']} were killed; {counted['doubled']} held twice,"
        f" {counted['stuck']} times stuck; longest wait {waits[-1]:.1f} s, median"
        f" {waits[len(waits) // 2]:.2f} s; all free {freed:.2f} s after the last was killed"
    )
    return 1 if counted["doubled"] or counted["stuck"] or freed > 2.0 else 0


def free_seconds(places: list[Path]) -> float:
    """Return how long it takes until nothing is held any more."""
    books, began = [LockTable(str(place)) for place in places], time.monotonic()
    names = [f"slot-{at}" for at in range(SLOTS)]
    while any(book.locked(name) for book in books for name in names):
        if time.monotonic() - began > STUCK_SECONDS:
            break
        time.sleep(0.01)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name, default in (("rounds", 1000), ("users", 8), ("nodes", 8), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        sys.exit(race(arguments.rounds, arguments.users, arguments.nodes, arguments.seed, place))


if __name__ == "__main__":
    main()
