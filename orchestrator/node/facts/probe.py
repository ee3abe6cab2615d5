"""Reads what this machine is, for the plan: addresses, networks, GPUs, torch, limits, the program.

Reads the kernel and the file system only: every launch asks, so no command is run and no part may
take long. What needs commands is in deep_probe.py.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import Any

from orchestrator.common.program import program_at
from orchestrator.node.facts import (
    disks,
    gpus,
    interfaces,
    limits,
    rdma,
    software,
    sysfs,
    unfinished_jobs,
)
from orchestrator.node.facts.with_timeouts import gather
from orchestrator.node.job.run_directory import home
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
    addresses = interfaces.interface_addresses()
    facts, problems = gather(
        SECONDS,
        {
            "workdir_exists": lambda: os.path.isdir(workdir),
            "target": lambda: resolve_target(request.target, workdir),
            "marker_seen": lambda: bool(request.marker) and os.path.lexists(request.marker),
            "disk": lambda: disks.disk(place_of_files(workdir), root),
            "software": lambda: software.software(root),
            "shm": lambda: disks.shared_memory(root=root),
            "leftovers": unfinished_jobs.leftovers,
            "cards": lambda: gpus.cards(root),
            "interfaces": lambda: interfaces.interfaces(root),
            "rdma": lambda: rdma.ports(root),
        },
    )
    refuse_unknown(problems, workdir)
    torch, installed = facts["software"]
    total, available = limits.memory_kb(root)
    return {
        **{name: facts.get(name) for name in ("disk", "shm")},
        **{name: facts.get(name, ()) for name in ("leftovers", "cards", "interfaces", "rdma")},
        **(software.accelerate() if request.accelerate else {}),
        "hostname": socket.gethostname(),
        "boot": sysfs.text(f"{root}/proc/sys/kernel/random/boot_id"),
        "network": network_space(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        **torch_here(torch, workdir),
        "software": installed,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus.gpu_count(root),
        "addresses": tuple(addresses),
        "routes": {peer: interfaces.route(peer, addresses) for peer in request.peers},
        "workdir": workdir,
        "workdir_exists": facts["workdir_exists"],
        "target": facts["target"],
        "marker_seen": facts.get("marker_seen", False),
        "limits": limits.limits(),
        "kernel": os.uname().release,
        "firewall": firewall(root),
        "memory_kb": total,
        "memory_available_kb": available,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "environment": own_settings(root),
        "problems": problems,
    }


def place_of_files(workdir: str) -> str:
    """Return where a job writes: what is not there is sent, and runs below our own directory."""
    return workdir if os.path.isdir(workdir) else home()


def torch_here(torch: str, workdir: str) -> dict[str, Any]:
    """Return torch's version; where the chosen Python has none, the others here that have it."""
    if torch:
        return {"torch": torch}
    look = {"torch_elsewhere": lambda: software.pythons_with_torch(workdir)}
    return {"torch": "", **gather(SECONDS, look)[0]}


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


def own_settings(root: str = "") -> dict[str, str]:
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
