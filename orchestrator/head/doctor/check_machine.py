"""Checks of each machine: reach, Python and torch, GPUs and their users, disks, limits. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from orchestrator.common import text
from orchestrator.common.hosts import join_names
from orchestrator.head.doctor.findings import (
    BAD,
    WARN,
    Case,
    Examined,
    Finding,
    bad_finding,
    odd_values,
    unequal_values,
    unknown_finding,
    warn_finding,
)
from orchestrator.head.nodes.facts import how_to_get_torch, nodes_by_value, version_release
from orchestrator.protocol.facts import Disk

# The oldest torch with which the engine can shard.
OLDEST_TORCH = (2, 8)
# A container's default, with which DataLoader workers and NCCL die of a bus error.
SHM_DEFAULT = 64 << 20
SHM_LEAST_BYTES = 16 << 20
DISK_LEAST, DISK_LITTLE = 16 << 20, 2 << 30
INODES_LITTLE = 1000
NOFILE_LEAST = 1024
CLOCK_OFF_SECONDS = 1.0
THERE = "as root there, in /etc/security/limits.conf; then log in again"


def memory_text(count: float) -> str:
    """Return a number of bytes as text in binary units."""
    return text.format_bytes(count, binary=True)


def on_node(node: Examined, *words: str) -> str:
    """Return an ssh command that runs these words on a node, quoted for its shell as well."""
    line = shlex.join(words)
    return f"ssh {node.name} {line if line == ' '.join(words) else shlex.quote(line)}"


# -- software -------------------------------------------------------------------------------------


def check_reach(case: Case) -> Iterator[Finding]:
    for node in case.nodes:
        if node.error:
            yield bad_finding(node, node.error, node.fix)


def check_python(case: Case) -> Iterator[Finding]:
    versions = [(n.name, ".".join(f.python_version.split(".")[:2])) for n, f in case.seen]
    fix = "python=/path/to/python{most} after these nodes in the list"
    yield from unequal_values(WARN, "Python", versions, fix)


def check_torch(case: Case) -> Iterator[Finding]:
    """Compare releases, whose wire formats differ; another build of the same one mostly works."""
    if not case.needs.torch:
        return
    there = [(node.name, facts.torch) for node, facts in case.seen if facts.torch]
    releases = [(name, without_build(version)) for name, version in there]
    lacking = {node.name: facts for node, facts in case.seen if not facts.torch}
    most, others = odd_values(releases)
    if lacking:
        of_python = nodes_by_value((name, facts.python) for name, facts in lacking.items())
        what = "; ".join(
            f"{join_names(who)}: {path} has no torch" for path, who in of_python.items()
        )
        yield Finding(BAD, tuple(lacking), what, how_to_get_torch(lacking, most or ""))
    fix = "on these nodes: python -m pip install torch=={most}"
    yield from unequal_values(BAD, "torch", releases, fix)
    unusable = list(unusable_torch(case))
    yield from unusable
    odd = {name for names in others.values() for name in names}
    odd |= {finding.nodes[0] for finding in unusable}
    builds = [(name, version) for name, version in there if name not in odd]
    yield from unequal_values(WARN, "builds of torch", builds)
    yield from check_imports(case)


def unusable_torch(case: Case) -> Iterator[Finding]:
    """Find a torch too old for the engine, or one that would silently train on the CPUs."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    for node, facts in case.seen:
        if not facts.torch:
            continue
        if case.needs.engine and (version_release(facts.torch) or (0, 0)) < OLDEST_TORCH:
            what = f"the engine needs torch {oldest} or later, and this is {facts.torch}"
            yield bad_finding(
                node, what, f"on {node.name}: python -m pip install 'torch>={oldest}'"
            )
        for_cpus = facts.torch.endswith("+cpu") or not (facts.software.cuda or facts.software.hip)
        if facts.gpus and for_cpus and facts.target_kind != "program":
            gpus = text.plural(facts.gpus, "GPU")
            fix = (
                f"on {node.name}: {facts.python} -m pip install --force-reinstall"
                f" torch=={without_build(facts.torch)}, from the index for its driver"
                " (https://pytorch.org/get-started/locally); or name a Python that has it"
            )
            yield bad_finding(
                node, f"it has {gpus}, and its torch {facts.torch} is built for CPUs", fix
            )


def check_imports(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        torch, facts = checkup.torch, node.facts
        if torch is None:
            yield unknown_finding(node, f"torch was not tried: {checkup.problems.get('torch', '')}")
        elif facts is None or not facts.torch:
            continue
        elif torch.error:
            fix = f"on {node.name}: {torch.python} -c 'import torch'"
            yield bad_finding(node, f"importing torch fails: {torch.error}", fix)
        elif facts.gpus and not torch.available and (torch.cuda or torch.hip):
            built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}"
            gpus = text.plural(facts.gpus, "GPU")
            fix = f"on {node.name}: nvidia-smi; {torch.python} -m torch.utils.collect_env"
            what = f"it has {gpus}, and its torch can use none: it is built for {built}"
            yield bad_finding(node, what, fix)


def without_build(version: str) -> str:
    """Return the release of a version: 2.13.0 for 2.13.0+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return match.group() if match else version


def check_nccl(case: Case) -> Iterator[Finding]:
    versions = {node.name: facts.software.nccl for node, facts in case.seen if facts.gpus}
    for node, checkup in case.checked_in_depth:
        if node.name in versions and checkup.torch and checkup.torch.nccl:
            versions[node.name] = checkup.torch.nccl
    values = [(name, version) for name, version in versions.items() if version]
    yield from unequal_values(
        BAD, "NCCL", values, "the same torch wheel on all nodes brings the same NCCL"
    )


def check_driver(case: Case) -> Iterator[Finding]:
    for kind in ("nvidia_driver", "amd_driver"):
        values = [(node.name, getattr(facts.software, kind)) for node, facts in case.seen]
        known = [(name, version) for name, version in values if version]
        yield from unequal_values(WARN, f"{kind.partition('_')[0].upper()} driver", known)


def check_code(case: Case) -> Iterator[Finding]:
    """Compare the copies of the program on the nodes."""
    copies = [(n.name, look.script[:12]) for n, look in case.checked_in_depth if look.script]
    yield from unequal_values(
        BAD, "sha256 of the program", copies, "copy it: rsync -a WORKDIR/ NODE:WORKDIR/"
    )


# -- GPUs ------------------------------------------------------------------------------------------


def check_gpus(case: Case) -> Iterator[Finding]:
    counts = [(node.name, facts.gpus) for node, facts in case.seen]
    yield from unequal_values(WARN, "GPUs", counts, "slots= in the node list evens them out")
    models = [
        (node.name, ", ".join(sorted({card.model for card in facts.cards})))
        for node, facts in case.seen
        if facts.cards
    ]
    yield from unequal_values(WARN, "GPU models", models, "the slowest sets the pace")
    yield from too_many_ranks(case)
    yield from check_sick(case)


def too_many_ranks(case: Case) -> Iterator[Finding]:
    """Find nodes with more ranks than GPUs; a program may set --nproc and use no GPU."""
    nproc = case.needs.nproc
    for node, facts in case.seen:
        wanted = nproc or node.slots
        if facts.gpus and wanted and wanted > facts.gpus:
            source = f"--nproc is {nproc}" if nproc else f"slots={node.slots} in the node list"
            what = f"it has {text.plural(facts.gpus, 'GPU')}, and {source}"
            fix = f"--nproc {facts.gpus}" if nproc else f"slots={facts.gpus}"
            yield (warn_finding if nproc and not case.needs.engine else bad_finding)(
                node, what, fix
            )


def check_sick(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        if checkup.problems.get("gpus"):
            yield bad_finding(node, checkup.problems["gpus"], f"on {node.name}: nvidia-smi")
        for gpu in checkup.gpus or ():
            if gpu.problem:
                yield bad_finding(node, f"GPU {gpu.index}: {gpu.problem}", "reset it")
            elif gpu.ecc_errors:
                errors = f"{gpu.ecc_errors} uncorrected memory errors since its driver started"
                fix = "reset it; replace it if they recur"
                yield bad_finding(node, f"GPU {gpu.index}: {errors}", fix)
            elif gpu.rows_failed or gpu.pages_pending or gpu.rows_pending:
                what = f"GPU {gpu.index}: memory that failed waits to be remapped"
                yield warn_finding(node, what, "reboot the node")
            if gpu.pcie_width and gpu.pcie_width_most and gpu.pcie_width < gpu.pcie_width_most:
                what = f"GPU {gpu.index}: PCIe x{gpu.pcie_width} of x{gpu.pcie_width_most}"
                yield warn_finding(node, what, "reseat the card")
        for xid in checkup.xids or ():
            if xid.sick:
                what = f"Xid {xid.xid} at {xid.pci}, {text.plural(xid.count, 'time')}: {xid.words}"
                yield warn_finding(node, what, "https://docs.nvidia.com/deploy/xid-errors/")


def check_busy(case: Case) -> Iterator[Finding]:
    for node, checkup in case.checked_in_depth:
        holders = checkup.holders or ()
        users = nodes_by_value((holder, holder.user or "an unknown user") for holder in holders)
        for user, theirs in sorted(users.items()):
            pids = join_names([str(holder.pid) for holder in theirs])
            jobs = sorted({holder.job for holder in theirs if holder.job})
            what = f"{user} holds {memory_text(sum(holder.used or 0 for holder in theirs))}"
            what += f" on its GPUs (PID {pids})" + (f", job {', '.join(jobs)}" if jobs else "")
            mine = node.facts is not None and user == node.facts.user
            fix = f"orchestrator stop {jobs[0].rpartition('-')[0]}" if jobs and mine else ""
            yield warn_finding(node, what, fix or f"ask {user}, or wait")


def check_ours(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        for left in facts.leftovers:
            if left.alive:
                fix = f"orchestrator status; orchestrator stop {left.job.rpartition('-')[0]}"
                yield warn_finding(node, f"the job {left.job} runs there", fix)
            else:
                fix = "emergency_stop ends what lives; then prune --on-nodes"
                yield warn_finding(node, f"the job {left.job} was left without its supervisor", fix)


# -- the rest of a machine -------------------------------------------------------------------------


def check_workdir(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        if not facts.workdir_exists and (case.needs.workdir or node.placed):
            fix = f"{on_node(node, 'mkdir', '-p', facts.workdir)}, or workdir= after it in the list"
            yield bad_finding(node, f"there is no directory {facts.workdir}", fix)
        elif facts.workdir_exists and facts.disk and not facts.disk.writable:
            yield warn_finding(
                node, f"{facts.workdir} cannot be written", "workdir= after it in the list"
            )


def check_disk(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        if facts.disk is None:
            reason = facts.problems.get("disk", "it does not answer")
            report = bad_finding if "answer" in reason else unknown_finding
            yield report(node, f"the disk of {facts.workdir}: {reason}")
        for place in {disk.mounted: disk for disk in (facts.home, facts.disk) if disk}.values():
            fix = (
                on_node(node, "df", "-h", place.mounted)
                + "; orchestrator prune --keep 5 --on-nodes"
            )
            if place.free < DISK_LITTLE:
                what = f"{place.mounted}: {room_text(place)}"
                yield (bad_finding if place.free < DISK_LEAST else warn_finding)(node, what, fix)
            if place.inodes and place.inodes_free < INODES_LITTLE:
                what = f"{place.mounted}: {place.inodes_free} inodes left: no more files"
                yield bad_finding(node, what, on_node(node, "df", "-i", place.mounted))
    if case.head is not None:
        yield from space_at_head(case.head)


def room_text(disk: Disk) -> str:
    return f"{memory_text(disk.free)} free of {memory_text(disk.total)}"


def space_at_head(disk: Disk) -> Iterator[Finding]:
    """Check the free space and inodes of the disk of the experiments."""
    where, fix = f"{disk.mounted} on this machine, of {disk.path}", "orchestrator prune --keep 5"
    if disk.free < DISK_LEAST:
        yield Finding(WARN if disk.free else BAD, (), f"{where}: {room_text(disk)}", fix)
    if disk.inodes and disk.inodes_free < INODES_LITTLE:
        what = f"{where}: {disk.inodes_free} inodes left: no more files"
        yield Finding(WARN if disk.inodes_free else BAD, (), what, fix)


def check_shm(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        disk = facts.shm
        if disk is None and "shm" in facts.problems:
            yield unknown_finding(node, f"/dev/shm: {facts.problems['shm']}")
        elif disk is None or not disk.writable:
            state = "cannot be written" if disk else "is not there"
            make = "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
            fix = "mount -o remount,rw,mode=1777 /dev/shm" if disk else make
            what = f"/dev/shm {state}: torchrun needs it, and so do DataLoader workers"
            yield bad_finding(node, what, f"as root on {node.name}: {fix}")
        elif disk.free < SHM_LEAST_BYTES:
            # NCCL cannot start without; gloo can.
            report = bad_finding if facts.gpus else warn_finding
            fix = f"ssh {node.name} ls -la /dev/shm"
            yield report(node, f"/dev/shm is full: {room_text(disk)}", fix)
        elif disk.total <= SHM_DEFAULT:
            fix = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir in memory"
            yield warn_finding(node, f"/dev/shm has {memory_text(disk.total)} in all", fix)


def check_limits(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        pinned, opened = facts.limits.memlock[0], facts.limits.nofile[0]
        if pinned != -1 and any(port.active and not port.software for port in facts.rdma):
            # Gloo, on CPUs, does not use RDMA.
            report = bad_finding if facts.gpus else warn_finding
            what = f"memlock is {memory_text(pinned)}, and RDMA pins more"
            yield report(node, what, f"'* - memlock unlimited', {THERE}")
        if -1 < opened < NOFILE_LEAST:
            yield warn_finding(
                node, f"{opened} open files at most (ulimit -n)", f"'* - nofile 65536', {THERE}"
            )


def check_clock(case: Case) -> Iterator[Finding]:
    for node, facts in case.seen:
        off = facts.clock_offset
        if abs(off) > CLOCK_OFF_SECONDS:
            which = "ahead of" if off > 0 else "behind"
            fix = f"on {node.name}: chronyc makestep, or timedatectl set-ntp true"
            yield warn_finding(node, f"its clock is {abs(off):.1f} s {which} this machine's", fix)
