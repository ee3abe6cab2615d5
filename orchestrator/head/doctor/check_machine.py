"""Checks of the machines: GPUs and who holds them, disks, memory, limits, clocks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from orchestrator.common import text
from orchestrator.common.hosts import listed
from orchestrator.head.doctor.findings import (
    BAD,
    UNKNOWN,
    WARN,
    Case,
    Examined,
    Finding,
    unequal,
)
from orchestrator.head.nodes.facts import by_value
from orchestrator.protocol.facts import Disk

SHM_DEFAULT = 64 << 20  # of a container; DataLoader workers and NCCL die of it with a bus error
SHM_LEAST_BYTES = 16 << 20
DISK_LEAST, DISK_LITTLE = 16 << 20, 2 << 30
INODES_LITTLE = 1000
NOFILE_LEAST = 1024
CLOCK_OFF_SECONDS = 1.0


def memory(count: float) -> str:
    """Write a number of bytes as memory is sold."""
    return text.size(count, binary=True)


def gpus(case: Case) -> Iterator[Finding]:
    counts = [(node.name, facts.gpus) for node, facts in case.seen]
    yield from unequal("gpus", WARN, "GPUs", counts, "slots= in the node list evens them out")
    models = [
        (node.name, ", ".join(sorted({card.model for card in facts.cards})))
        for node, facts in case.seen
        if facts.cards
    ]
    yield from unequal("gpus", WARN, "GPU models", models, "the slowest sets the pace")
    yield from too_many_ranks(case)
    yield from sick(case)


def too_many_ranks(case: Case) -> Iterator[Finding]:
    """Find nodes with more ranks than GPUs; a program may mean --nproc, and use no GPU."""
    nproc = case.needs.nproc
    for node, facts in case.seen:
        wanted = nproc or node.slots
        if facts.gpus and wanted and wanted > facts.gpus:
            source = f"--nproc is {nproc}" if nproc else f"slots={node.slots} in the node list"
            what = f"{node.name} has {text.plural(facts.gpus, 'GPU')}, and {source}"
            fix = f"--nproc {facts.gpus}" if nproc else f"slots={facts.gpus}"
            level = WARN if nproc and not case.needs.engine else BAD
            yield Finding("gpus", level, (node.name,), what, fix)


def sick(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        if checkup.problems.get("gpus"):
            what = f"{node.name}: {checkup.problems['gpus']}"
            yield Finding("gpus", BAD, (node.name,), what, f"on {node.name}: nvidia-smi")
        for gpu in checkup.gpus or ():
            who = f"GPU {gpu.index} of {node.name}"
            worn = gpu.rows_failed or gpu.pages_pending or gpu.rows_pending
            if gpu.problem:
                yield Finding("gpus", BAD, (node.name,), f"{who}: {gpu.problem}", "reset it")
            elif gpu.ecc_errors:
                what = f"{who}: {gpu.ecc_errors} uncorrected memory errors since its driver started"
                yield Finding("gpus", BAD, (node.name,), what, "reset it; replace it if they recur")
            elif worn:
                what = f"{who}: memory that failed waits to be remapped"
                yield Finding("gpus", WARN, (node.name,), what, "reboot the node")
            if gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_width < gpu.pcie_width_most:
                what = f"{who}: PCIe x{gpu.pcie_width} of x{gpu.pcie_width_most}"
                yield Finding("gpus", WARN, (node.name,), what, "reseat the card")
        for xid in checkup.xids or ():
            if xid.sick:
                times = text.plural(xid.count, "time")
                what = f"{node.name}: Xid {xid.xid} at {xid.pci}, {times}: {xid.words}"
                yield Finding(
                    "gpus", WARN, (node.name,), what, "https://docs.nvidia.com/deploy/xid-errors/"
                )


def busy(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        holders = checkup.holders or ()
        for user in sorted({holder.user or "somebody" for holder in holders}):
            theirs = [h for h in holders if (h.user or "somebody") == user]
            used = sum(holder.used or 0 for holder in theirs)
            pids = listed([str(holder.pid) for holder in theirs])
            jobs = sorted({holder.job for holder in theirs if holder.job})
            mine = node.facts is not None and user == node.facts.user
            what = f"{node.name}: {user} holds {memory(used)} on its GPUs (PID {pids})"
            what += f", job {', '.join(jobs)}" if jobs else ""
            fix = f"orchestrator stop {jobs[0].rpartition('-')[0]}" if jobs and mine else ""
            yield Finding("busy", WARN, (node.name,), what, fix or f"ask {user}, or wait")


def ours(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        for left in facts.leftovers:
            if left.alive:
                what, level = f"{node.name}: the job {left.job} runs there", WARN
                fix = f"orchestrator status; orchestrator stop {left.job.rpartition('-')[0]}"
            else:
                what = f"{node.name}: the job {left.job} was left without its supervisor"
                level, fix = WARN, "emergency_stop ends what lives; then prune --on-nodes"
            yield Finding("ours", level, (node.name,), what, fix)


def on(node: Examined, *words: str) -> str:
    """Return what to type here to run a command there; ssh has a shell read it once more."""
    line = shlex.join(words)
    return f"ssh {node.name} {line if line == ' '.join(words) else shlex.quote(line)}"


def workdir(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        if not facts.workdir_exists and not (case.needs.workdir or node.placed):
            continue
        if not facts.workdir_exists:
            fix = f"{on(node, 'mkdir', '-p', facts.workdir)}, or workdir= after it in the list"
            what = f"{node.name}: there is no directory {facts.workdir}"
            yield Finding("workdir", BAD, (node.name,), what, fix)
        elif facts.disk and not facts.disk.writable:
            what = f"{node.name}: {facts.workdir} cannot be written"
            yield Finding("workdir", WARN, (node.name,), what, "workdir= after it in the list")


def disk(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        if facts.disk is None:
            reason = facts.problems.get("disk", "it does not answer")
            what = f"{node.name}: the disk of {facts.workdir}: {reason}"
            yield Finding("disk", BAD if "answer" in reason else UNKNOWN, (node.name,), what)
        for place in {disk.mounted: disk for disk in (facts.home, facts.disk) if disk}.values():
            yield from space(node, place)
    if case.head is not None:
        yield from space_at_head(case.head)


def space(node: Examined, disk: Disk) -> Iterator[Finding]:
    where = f"{disk.mounted} on {node.name}"
    fix = f"{on(node, 'df', '-h', disk.mounted)}; orchestrator prune --keep 5 --on-nodes"
    if disk.free < DISK_LITTLE:
        level = BAD if disk.free < DISK_LEAST else WARN
        what = f"{where}: {memory(disk.free)} free of {memory(disk.total)}"
        yield Finding("disk", level, (node.name,), what, fix)
    if disk.inodes and disk.inodes_free < INODES_LITTLE:
        what = f"{where}: {disk.inodes_free} inodes left: no more files"
        yield Finding("disk", BAD, (node.name,), what, on(node, "df", "-i", disk.mounted))


def space_at_head(disk: Disk) -> Iterator[Finding]:
    """Judge the disk of the experiments, where logs and records need little, and need it all."""
    where = f"{disk.mounted} on this machine, of {disk.path}"
    if disk.free < DISK_LEAST:
        what = f"{where}: {memory(disk.free)} free of {memory(disk.total)}"
        fix = f"{shlex.join(['df', '-h', disk.mounted])}; orchestrator prune --keep 5"
        yield Finding("disk", WARN if disk.free else BAD, (), what, fix)
    if disk.inodes and disk.inodes_free < INODES_LITTLE:
        what = f"{where}: {disk.inodes_free} inodes left: no more files"
        fix = f"{shlex.join(['df', '-i', disk.mounted])}; orchestrator prune --keep 5"
        yield Finding("disk", WARN if disk.inodes_free else BAD, (), what, fix)


def shm(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        disk = facts.shm
        if disk is None and "shm" in facts.problems:
            what = f"{node.name}: /dev/shm: {facts.problems['shm']}"
            yield Finding("shm", UNKNOWN, (node.name,), what)
        elif disk is None or not disk.writable:
            state = "cannot be written" if disk else "is not there"
            what = f"{node.name}: /dev/shm {state}: torchrun needs it, and so do DataLoader workers"
            make = "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            fix = "mount -o remount,rw,mode=1777 /dev/shm" if disk else make
            yield Finding("shm", BAD, (node.name,), what, f"as root on {node.name}: {fix}")
        elif disk.free < SHM_LEAST_BYTES:
            what = (
                f"{node.name}: /dev/shm is full: {memory(disk.free)} free of {memory(disk.total)}"
            )
            level = BAD if facts.gpus else WARN  # NCCL cannot start without; gloo does
            yield Finding("shm", level, (node.name,), what, f"ssh {node.name} ls -la /dev/shm")
        elif disk.total <= SHM_DEFAULT:
            what = f"{node.name}: /dev/shm has {memory(disk.total)} in all"
            fix = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir in memory"
            yield Finding("shm", WARN, (node.name,), what, fix)


def limits(case: Case) -> Iterator[Finding]:
    pinned = by_value(
        (node.name, (facts.limits.memlock[0], bool(facts.gpus)))
        for node, facts in case.seen
        if any(port.active and not port.software for port in facts.rdma)
    )
    files = by_value((node.name, facts.limits.nofile[0]) for node, facts in case.seen)
    there = "as root there, in /etc/security/limits.conf; then log in again"
    for (limit, gpus), names in pinned.items():
        if limit == -1:
            continue
        level = BAD if gpus else WARN  # gloo, on CPUs, does not use RDMA
        what = f"memlock is {memory(limit)} on {listed(names)}, and RDMA pins more"
        yield Finding("limits", level, tuple(names), what, f"'* - memlock unlimited', {there}")
    for limit, names in files.items():
        if limit == -1 or limit >= NOFILE_LEAST:
            continue
        what = f"{limit} open files at most (ulimit -n) on {listed(names)}"
        yield Finding("limits", WARN, tuple(names), what, f"'* - nofile 65536', {there}")


def clock(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        off = facts.clock_offset
        if abs(off) > CLOCK_OFF_SECONDS:
            which = "ahead of" if off > 0 else "behind"
            what = f"{node.name}: its clock is {abs(off):.1f} s {which} this machine's"
            fix = f"on {node.name}: chronyc makestep, or timedatectl set-ntp true"
            yield Finding("clock", WARN, (node.name,), what, fix)
