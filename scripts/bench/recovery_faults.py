"""The faults of recovery.py: to processes, links, machines, disks, memory, and by programs.

Faults of any disks are in harm_faults.py. Each function causes its fault and returns the
place. The victims are the hosts that the verdict may name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import harm_faults
from ground import ROOT  # noqa: F401  tests/ can be imported then
from harm_faults import MOMENTS

from tests.end_to_end.harm import Harm, Seam

LEASE = 10.0  # --node-loss-timeout
# --hang-timeout; a start beside other work may take 30 s.
HANG = 40.0
ASLEEP = "head stopped for moments"
SHARED_MEMORY_MB = 64
OOM_BYTES = 8 << 20
# Tries to limit the number of files on a disk while other processes create some.
MOST_TRIES = 20
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


class UnderFire(Harm):
    """A job of recovery.py: `control` is where its ranks read what to do to themselves."""

    control: Path
    # Set if a rank does the same to itself in each attempt.
    always: bool = False
    # The rank and step whose loss was NaN.
    poisoned: tuple[int, int] | None = None
    step: int = 0

    def order(self, node: int, what: str, *, always: bool = False) -> str:
        """Order a rank to do something to itself a few steps from now."""
        step = self.step + 3
        path = self.control / f"do_{node}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"what": what, "step": step, "always": always}))
        new.replace(path)
        return f"rank {node} at step {step}"

    def pids(self, node: int, what: str) -> list[int]:
        """Return the PIDs of a kind of process of a node, as its host numbers them."""
        host = self.host(node)
        if what == "server":
            words = ["pgrep", "-f", "old-python|node.server|serve"]
        elif what == "keeper":
            words = ["pgrep", "-P", str(self.started(node)["agent"])]
        elif what == "rank":
            words = ["pgrep", "-x", f"rank{node}"]
        else:
            return [int(self.started(node)[what])]
        with contextlib.suppress(AssertionError):
            return [int(pid) for pid in self.cluster.exec(host, words).split()]
        return []

    def signal(self, node: int, what: str, number: signal.Signals) -> list[int]:
        """Send a signal to such processes of a node; return those that were there."""
        reached = []
        for pid in self.pids(node, what):
            with contextlib.suppress(KeyError, ProcessLookupError):
                self.cluster.kill(self.host(node), pid, number)
                reached.append(pid)
        return reached

    def for_a_while(self, seconds: float, undo: Callable[[], object]) -> None:
        """Undo a fault after a time, and at the latest when this fault is over."""
        done = threading.Lock()

        def once() -> None:
            if done.acquire(blocking=False):
                with contextlib.suppress(AssertionError, OSError):
                    undo()

        timer = threading.Timer(seconds, once)
        timer.daemon = True
        timer.start()
        self.repairs.append(once)


Job = UnderFire

# -- processes ------------------------------------------------------------------------------------


def every_rank(one: Job) -> str:
    for node in range(one.nodes):
        one.kill_rank(node)
    return "all nodes"


def keeper(one: Job) -> str:
    node = one.node()
    if one.signal(node, "keeper", signal.SIGKILL):
        one.victims.append(node)
    return f"node {node}"


def server(one: Job) -> str:
    node = one.node()
    return f"node {node}, {len(one.signal(node, 'server', signal.SIGKILL))} processes"


def sshd_for_moments(one: Job) -> str:
    host, began = one.host(node := one.node()), time.monotonic()
    one.cluster.kill_sshd(host)
    time.sleep(one.chance.uniform(0.0, 3.0))
    one.cluster.start_sshd(host)
    away = time.monotonic() - began
    # A busy machine makes the pause so long that the node may count as lost.
    if away > LEASE / 2:
        one.victims.append(node)
    return f"host {host}, {away:.0f} s"


def stopped(one: Job, node: int, what: str, seconds: float) -> str:
    """Send SIGSTOP, and SIGCONT later, unless the job went on without the process."""
    host, pids = one.host(node), one.signal(node, what, signal.SIGSTOP)

    def go_on() -> None:
        for pid in pids:
            with contextlib.suppress(KeyError, ProcessLookupError):
                one.cluster.kill(host, pid, signal.SIGCONT)

    one.for_a_while(seconds, go_on)
    return f"node {node}, {seconds:.0f} s"


def rank_stops_for_moments(one: Job) -> str:
    where = stopped(one, one.node(), "rank", 4.0)
    time.sleep(4.0)
    return where


def rank_stops(one: Job) -> str:
    one.victims.append(node := one.node())
    return stopped(one, node, "rank", 3 * HANG)


def supervisor_stops_for_moments(one: Job) -> str:
    where = stopped(one, one.node(), "supervisor", 4.0)
    time.sleep(4.0)
    return where


def supervisor_stops(one: Job) -> str:
    one.victims.append(node := one.chance.randrange(1, one.nodes))
    return stopped(one, node, "supervisor", 3 * LEASE)


def masters_supervisor_stops(one: Job) -> str:
    one.victims.append(0)
    return stopped(one, 0, "supervisor", 3 * LEASE)


def slow_rank(one: Job) -> str:
    """Slow a rank down to a sixth of a core for ten seconds."""
    node = one.node()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        one.signal(node, "rank", signal.SIGSTOP)
        time.sleep(0.25)
        one.signal(node, "rank", signal.SIGCONT)
        time.sleep(0.05)
    return f"node {node}"


def head_stops_for_moments(one: Job) -> str:
    one.command.process.send_signal(signal.SIGSTOP)
    time.sleep(one.chance.uniform(1.0, 2 * LEASE))
    one.command.process.send_signal(signal.SIGCONT)
    return "the head"


# -- links ----------------------------------------------------------------------------------------


def flapping(one: Job) -> str:
    host = one.host(one.node())
    for _ in range(5):
        one.cluster.cut(host)
        time.sleep(1.0)
        one.cluster.restore(host)
        time.sleep(1.0)
    return f"host {host}"


def link_cut_for_long(one: Job) -> str:
    """Cut a node off for longer than the lease: it returns while the job runs without it."""
    node = one.node()
    host = one.host(node)
    one.cluster.cut(host)
    one.victims.append(node)
    one.for_a_while(2.5 * LEASE, lambda: one.cluster.restore(host))
    return f"node {node}, host {host}"


def one_way(one: Job, *, out: bool) -> str:
    node = one.node()
    host = one.host(node)
    me, others = one.cluster.addresses[host], [*range(one.cluster.size), None]
    others.remove(host)
    for other in others:
        there = head_address(one) if other is None else one.cluster.addresses[other]
        here, to = (host, there) if out else (other, me)
        one.cluster.vanish(here, to)
        one.repairs.append(lambda here=here, to=to: one.cluster.arrive(here, to))  # type: ignore[misc]
    one.victims.append(node)
    return f"node {node}, host {host}"


def nothing_goes_out(one: Job) -> str:
    return one_way(one, out=True)


def nothing_comes_in(one: Job) -> str:
    return one_way(one, out=False)


def between_two(one: Job) -> str:
    """Cut the link between two nodes; all others reach both."""
    first, second = one.chance.sample(range(one.nodes), 2)
    hosts = one.host(first), one.host(second)
    for here, there in (hosts, hosts[::-1]):
        address = one.cluster.addresses[there]
        one.cluster.vanish(here, address)
        one.repairs.append(lambda h=here, a=address: one.cluster.arrive(h, a))  # type: ignore[misc]
    one.victims += [first, second]
    return f"nodes {first} and {second}"


def head_address(one: Job) -> str:
    return one.cluster.addresses[0].rpartition(".")[0] + ".254"


def cut_as_the_next_begins(one: Job) -> str:
    node, before = one.node(), one.attempts
    one.kill_rank(node)
    one.await_next_attempt(before)
    host = one.host(node)
    one.cluster.cut(host)
    time.sleep(one.chance.uniform(1.0, MOMENTS))
    one.cluster.restore(host)
    return f"node {node}, host {host}"


# -- machines -------------------------------------------------------------------------------------


def rebooted(one: Job, node: int, *, disk_lost: bool) -> str:
    host = one.host(node)
    one.victims.append(node)
    one.cluster.power_off(host, disk_lost=disk_lost)
    seconds = one.chance.choice([1.0, 6.0, 15.0])
    one.for_a_while(seconds, lambda: one.cluster.power_on(host))
    return f"node {node}, host {host}, away for {seconds:.0f} s"


def reboot_disk_kept(one: Job) -> str:
    return rebooted(one, one.node(), disk_lost=False)


def reboot_disk_lost(one: Job) -> str:
    return rebooted(one, one.node(), disk_lost=True)


def reboot_in_the_recovery(one: Job) -> str:
    node = one.node()
    one.kill_rank(node)
    time.sleep(one.chance.uniform(0.0, 0.8))
    where = rebooted(one, one.node(), disk_lost=one.chance.random() < 0.5)
    return f"node {node} killed, then {where}"


def in_a_recovery_from_memory(one: Job) -> str:
    """Kill a rank, then another or its machine while the ranks load their state from memory."""
    first, second, before, step = one.node(), one.node(), one.attempts, one.step
    one.kill_rank(first)
    one.await_next_attempt(before)
    one.until(lambda: one.head.record["state"] == "running", "the next attempt")
    one.until(lambda: one.pids(second, "rank"), f"rank {second} of the next attempt")
    time.sleep(one.chance.uniform(0.0, 1.0))
    where = f"rank {second}"
    if one.chance.random() < 0.4:
        where = rebooted(one, second, disk_lost=one.chance.random() < 0.5)
    else:
        one.kill_rank(second)
    late = ", after a step" if one.step > step + 1 else ""
    return f"node {first} killed, then {where}{late}"


def clock_jumps(one: Job) -> str:
    """The clock of a node, or of all, is set by hours; a moment later a rank is killed.

    It stays as it is, or is put right in the recovery. To all nodes together their disk's is wrong.
    """
    hours, node = one.chance.choice([-26.0, -1.0, -0.02, 1.0, 400.0]), one.node()
    several = range(one.cluster.size) if one.chance.random() < 0.4 else [one.host(node)]
    clocks = [one.cluster.path(h, one.cluster.home_path) / ".clock" for h in several]

    def set_to(seconds: float) -> None:
        for clock in clocks:
            clock.write_text(f"{seconds:+.0f}\n")

    set_to(3600 * hours)
    time.sleep(one.chance.uniform(0.5, 4.0))
    one.kill_rank(node)
    if one.chance.random() < 0.5:
        one.for_a_while(one.chance.uniform(0.5, 6.0), lambda: set_to(0))
    return f"node {node}, {len(clocks)} clocks, {hours:+g} h"


# -- memory and disks -----------------------------------------------------------------------------


def full(one: Job, place: str) -> str:
    """A place on a node is full; its rank may be killed then, and something has to be written."""
    node = one.node()
    host = one.host(node)
    words = f"head -c 2G /dev/zero > {place}/filler 2> /dev/null; true"
    one.cluster.exec(host, ["sh", "-c", words])
    one.kill_rank(node)
    one.victims.append(node)
    one.for_a_while(
        one.chance.choice([6.0, 40.0]), lambda: one.cluster.path(host, f"{place}/filler").unlink()
    )
    return f"node {node}, host {host}"


def no_inodes(one: Job) -> str:
    """Use up the inodes of a disk that still has room."""
    node = one.node()
    host, place = one.host(node), one.cluster.home_path
    status = os.statvfs(one.cluster.path(host, place))

    def let(most: int) -> None:
        one.cluster.exec(host, ["mount", "-o", f"remount,nr_inodes={most}", place])

    for _ in range(MOST_TRIES):
        now = os.statvfs(one.cluster.path(host, place))
        # Other processes may have created more files than that since.
        with contextlib.suppress(AssertionError):
            let(now.f_files - now.f_ffree + 2)
            break
    one.kill_rank(node)
    one.victims.append(node)
    one.for_a_while(one.chance.choice([6.0, 40.0]), lambda: let(status.f_files))
    return f"node {node}, host {host}"


def shared_memory_full(one: Job) -> str:
    return full(one, "/dev/shm")


def disk_full(one: Job) -> str:
    return full(one, one.cluster.home_path)


def out_of_memory(one: Job) -> str:
    """Put a rank into a cgroup with little memory, so that the kernel kills it."""
    node = one.node()
    group = MEMORY_GROUPS / f"recovery-{os.getpid()}"
    group.mkdir(exist_ok=True)
    outside = one.cluster._numbers_outside(one.host(node))
    for pid in one.pids(node, "rank"):
        (group / "cgroup.procs").write_text(str(outside[pid]))
        one.victims.append(node)
    (group / "memory.limit_in_bytes").write_text(str(OOM_BYTES))
    return one.order(node, "memory")


# -- what programs do by themselves ---------------------------------------------------------------


def by_itself(what: str) -> Callable[[Job], str]:
    def harmed(one: Job) -> str:
        one.victims.append(node := one.node())
        return one.order(node, what)

    return harmed


def not_a_number(one: Job) -> str:
    """No attempt ends by it: a Trainer leaves the step out, and a script goes on with NaN."""
    node = one.node()
    one.poisoned = node, one.step + 3
    return one.order(node, "nan")


def the_same_in_each_attempt(one: Job) -> str:
    one.victims.append(node := one.node())
    one.always = True
    return one.order(node, "raise", always=True)


# A machine that loses its disk loses what it had not sent; the others return at the end.
VANISHES = re.compile("without its disk|in the recovery|from memory")
LAST = {"NaN": not_a_number, "the same exception in each attempt": the_same_in_each_attempt}
FAULTS: dict[str, Callable[[Job], str]] = {
    **{name: fault for name, fault in harm_faults.FAULTS.items() if name != "node rebooted"},
    "all ranks killed": every_rank,
    "keeper killed": keeper,
    "our server killed": server,
    "sshd killed and back": sshd_for_moments,
    "rank stopped for moments": rank_stops_for_moments,
    "rank stopped": rank_stops,
    "supervisor stopped for moments": supervisor_stops_for_moments,
    "supervisor stopped": supervisor_stops,
    "master's supervisor stopped": masters_supervisor_stops,
    "slow rank": slow_rank,
    ASLEEP: head_stops_for_moments,
    "link flapping": flapping,
    "link cut for long": link_cut_for_long,
    "nothing goes out": nothing_goes_out,
    "nothing comes in": nothing_comes_in,
    "link cut between two nodes": between_two,
    "link cut as the next attempt begins": cut_as_the_next_begins,
    "rebooted with its disk": reboot_disk_kept,
    "rebooted without its disk": reboot_disk_lost,
    "rebooted in the recovery": reboot_in_the_recovery,
    "killed in a recovery from memory": in_a_recovery_from_memory,
    "/dev/shm full": shared_memory_full,
    "no inodes left": no_inodes,
    "disk full": disk_full,
    "out of memory": out_of_memory,
    "exception": by_itself("raise"),
    "exit 3": by_itself("exit 3"),
    "exit 0": by_itself("exit 0"),
    "segmentation fault": by_itself("segv"),
    "hang": by_itself("hang"),
    "spin": by_itself("spin"),
    **LAST,
}
# Needs clock.c.
CLOCKS = {"clock jumps": clock_jumps}
__all__ = [
    "ASLEEP",
    "CLOCKS",
    "FAULTS",
    "HANG",
    "LAST",
    "LEASE",
    "SHARED_MEMORY_MB",
    "VANISHES",
    "Seam",
    "UnderFire",
]
