"""Reads what this machine is, for the plan: addresses, networks, GPUs, torch, limits, the program.

Reads the kernel and the file system only: every launch asks, so no command is run and no part may
take long. What needs commands is in checkup.py.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.common.program import program_at
from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import RunDir, all_runs, connect, home, runs_here
from orchestrator.node.machine import disks, network, software, sysfs
from orchestrator.node.machine.gpus import amd, nvidia
from orchestrator.protocol.events import Ended
from orchestrator.protocol.facts import Leftover, Limits
from orchestrator.protocol.requests.machine import Probe, ProbeTarget

SECONDS = 3.0  # for any part: a network file system whose server is gone never answers
# What is in the environment already was set by somebody who knows this machine.
OWN_SETTINGS = ("NCCL_", "RCCL_", "GLOO_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE")
NCCL_CONF = "/etc/nccl.conf"
UFW = "/etc/ufw/ufw.conf"
# A service that runs has a control group; firewalld without a pid file has only that.
FIREWALLD = (
    "/sys/fs/cgroup/system.slice/firewalld.service",
    "/sys/fs/cgroup/systemd/system.slice/firewalld.service",
    "/run/firewalld.pid",
)


def probe(request: Probe, root: str = "") -> dict[str, Any]:
    """Return the fields of a Probed. `root` stands before /sys and /proc, for tests."""
    workdir = os.path.expanduser(request.workdir or request.cwd)
    addresses = network.interface_addresses()
    facts, problems = gather(
        SECONDS,
        {
            "workdir_exists": lambda: os.path.isdir(workdir),
            "target": lambda: resolve_target(request.target, workdir),
            "marker_seen": lambda: bool(request.marker) and os.path.lexists(request.marker),
            "software": lambda: software.software(root),
            **disks_of(workdir, root),
            "leftovers": leftovers,
            "cards": lambda: nvidia.cards(root) + amd.cards(root),
            "interfaces": lambda: network.interfaces(root),
            "rdma": lambda: network.rdma_ports(root),
        },
    )
    refuse_unknown(problems, workdir)
    torch, installed = facts["software"]
    return {
        **{name: facts.get(name) for name in disks_of(workdir, root)},
        **{name: facts.get(name, ()) for name in LISTS},
        **(software.accelerate() if request.accelerate else {}),
        "hostname": socket.gethostname(),
        "runs": runs_here(),
        "boot": sysfs.text(f"{root}/proc/sys/kernel/random/boot_id"),
        "network": network_space(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        **torch_here(torch, workdir),
        "software": installed,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpu_count(root),
        "addresses": tuple(addresses),
        "routes": {peer: network.route(peer, addresses) for peer in request.peers},
        "workdir": workdir,
        "workdir_exists": facts["workdir_exists"],
        "target": facts["target"],
        "marker_seen": facts.get("marker_seen", False),
        "limits": limits(),
        "kernel": os.uname().release,
        "firewall": firewall(root),
        **memory_kb(root),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "environment": machine_settings(root),
        "problems": problems,
    }


LISTS = ("leftovers", "cards", "interfaces", "rdma")


def disks_of(workdir: str, root: str) -> dict[str, Work]:
    return {
        # What is not there is sent, and runs below our own directory.
        "disk": lambda: disks.disk(workdir if os.path.isdir(workdir) else home(), root),
        "home": lambda: disks.disk(home(), root),
        "shm": lambda: disks.shared_memory(root=root),
    }


def torch_here(torch: str, workdir: str) -> dict[str, Any]:
    """Return torch's version; where the chosen Python has none, the others here that have it."""
    if torch:
        return {"torch": torch}
    elsewhere = {"torch_elsewhere": lambda: software.pythons_with_torch(workdir)}
    return {"torch": "", **gather(SECONDS, elsewhere)[0]}


DISK = {
    "workdir_exists": "the directory {}",
    "target": "the program in {}",
    "software": "where torch is installed",
}


def refuse_unknown(problems: dict[str, str], workdir: str) -> None:
    """Raise where a part is missing without which nothing can be planned."""
    for name, what in DISK.items():
        if name in problems:
            raise ValueError(f"{what.format(workdir)}: {problems[name]}; a disk that hangs?")


def network_space() -> int:
    """Return the network namespace: two nodes with one boot and one of these are one machine."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def machine_settings(root: str = "") -> dict[str, str]:
    """Return NCCL's settings of this machine or login; as in NCCL, the environment wins."""
    settings = {}
    for line in sysfs.text(root + NCCL_CONF).splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.lstrip().startswith("#"):
            settings[name.strip()] = value.strip()
    settings.update({k: v for k, v in os.environ.items() if k.startswith(OWN_SETTINGS)})
    return settings


def resolve_target(target: ProbeTarget, workdir: str) -> ProbeTarget:
    """Say what kind of program this is here: "script" (Python), "module", "program", or why not."""
    if target.kind != "auto":
        return target
    kind, name = program_at(target.name, workdir)
    return ProbeTarget(kind=kind, name=name)


def firewall(root: str = "") -> str:
    """Return "ufw", "firewalld", or nothing where neither of them runs."""
    if any(os.path.exists(root + path) for path in FIREWALLD):
        return "firewalld"
    enabled = re.search(r"^ENABLED=['\"]?yes", sysfs.text(root + UFW), re.MULTILINE | re.IGNORECASE)
    return "ufw" if enabled else ""


def gpu_count(root: str = "") -> int:
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if "SLURM_STEP_ID" in os.environ and count.isdigit():
        return int(count)  # of the job's own; the others in /dev are somebody else's
    in_dev = sum(1 for name in sysfs.names(f"{root}/dev") if re.fullmatch(r"nvidia\d+", name))
    return in_dev or amd.count(root)


KINDS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def limits() -> Limits:
    """Return the limits of this login, and so of its ranks."""
    return Limits(**{name: resource.getrlimit(kind) for name, kind in KINDS.items()})


def memory_kb(root: str = "") -> dict[str, int]:
    sizes = sysfs.meminfo(root)
    parts = {"memory_kb": "MemTotal", "memory_available_kb": "MemAvailable"}
    return {name: sizes.get(part, 0) >> 10 for name, part in parts.items()}


NEWEST = 64  # a machine that ran thousands of jobs must not read all of their events


def leftovers() -> tuple[Leftover, ...]:
    """Return the jobs here that have not ended, whether or not their supervisors answer."""
    runs = sorted(all_runs(), key=changed, reverse=True)[:NEWEST]
    unfinished = [run for run in runs if os.path.exists(run.spec) and run.last(Ended) is None]
    return tuple(
        Leftover(job=run.job, node=run.node, alive=answers_still(run))
        for run in job_processes.here(unfinished)
    )


def changed(run: RunDir) -> float:
    try:
        return os.stat(run.path).st_mtime
    except OSError:
        return 0.0


def answers_still(run: RunDir) -> bool:
    try:
        connect(run).close()
    except OSError:
        return False
    return True


Work = Callable[[], Any]


class Worker(threading.Thread):
    """Does the parts in order; `at` shows which one it is doing."""

    def __init__(self, parts: Mapping[str, Work]) -> None:
        super().__init__(daemon=True)
        self.parts = parts
        self.at = ""
        self.results: dict[str, Any] = {}
        self.problems: dict[str, str] = {}
        self.crash: BaseException | None = None

    def run(self) -> None:
        try:
            for name, work in self.parts.items():
                self.at = name
                try:
                    self.results[name] = work()
                except (OSError, ValueError) as error:
                    self.problems[name] = str(error)
        except BaseException as error:  # noqa: BLE001  a defect of ours: raised where it is waited for
            self.crash = error


def gather(seconds: float, parts: Mapping[str, Work]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (results, why the others are missing). No part takes longer than `seconds`."""
    results: dict[str, Any] = {}
    problems: dict[str, str] = {}
    rest = dict(parts)
    while rest:
        worker = Worker(rest)
        worker.start()
        worker.join(seconds)
        if worker.crash is not None:
            raise worker.crash
        late = worker.at if worker.is_alive() else ""
        results.update({name: value for name, value in worker.results.items() if name != late})
        problems.update(worker.problems)
        if not late:
            break
        problems[late] = f"it did not answer within {seconds:g} s"
        names = list(rest)
        rest = {name: rest[name] for name in names[names.index(late) + 1 :]}
    return results, problems
