"""Reads the facts that a plan needs: addresses, networks, GPUs, torch, limits, the program.

Reads only the kernel and the file system: every launch probes, so no command is run and no part may
take long. Facts that need commands are in checkup.py.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.common import files
from orchestrator.common.program import program_at
from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import (
    RunDir,
    all_runs,
    connect_supervisor,
    runs_here,
)
from orchestrator.node.machine import amd, disks, network, nvidia, sysfs
from orchestrator.protocol.events import Ended
from orchestrator.protocol.facts import Leftover, Limits, Software
from orchestrator.protocol.requests.machine import Probe
from orchestrator.protocol.spec import Target

# The limit for each part: a network file system whose server is gone never answers.
SECONDS = 3.0
# These variables were set for this machine, so the plan keeps them.
OWN_SETTINGS = ("NCCL_", "RCCL_", "GLOO_", "CUDA_VISIBLE", "HIP_VISIBLE", "ROCR_VISIBLE")
NCCL_CONF = "/etc/nccl.conf"
LISTS = ("leftovers", "cards", "interfaces", "rdma")

Work = Callable[[], Any]


def probe_machine(request: Probe, root: str = "") -> dict[str, Any]:
    """Return the fields of a Probed. Tests put `root` before /sys and /proc."""
    workdir = os.path.expanduser(request.workdir or request.cwd)
    addresses = network.interface_addresses()
    facts, problems = gather_parts(
        SECONDS,
        {
            "workdir_exists": lambda: os.path.isdir(workdir),
            "target": lambda: resolve_target(request.target, workdir),
            "sees_directory": lambda: bool(request.marker) and os.path.lexists(request.marker),
            "software": lambda: read_software(root),
            **disks_of(workdir),
            "leftovers": find_leftovers,
            "cards": lambda: nvidia.read_cards(root) + amd.read_cards(root),
            "interfaces": lambda: network.read_interfaces(root),
            "rdma": lambda: network.rdma_ports(root),
        },
    )
    refuse_unknown(problems, workdir)
    torch, installed = facts["software"]
    routes = ((peer, network.find_route(peer, addresses)) for peer in request.peers)
    return {
        **{name: facts.get(name) for name in disks_of(workdir)},
        **{name: facts.get(name, ()) for name in LISTS},
        **(accelerate_version() if request.accelerate else {}),
        "hostname": socket.gethostname(),
        "runs": runs_here(),
        "boot": sysfs.read_text(f"{root}/proc/sys/kernel/random/boot_id"),
        "network": network_space(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        **torch_here(torch, workdir),
        "software": installed,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpu_count(root),
        "addresses": tuple(addresses),
        "routes": {p: way for p, way in routes if p in request.peers[:1] or not way[1]},
        "workdir": workdir,
        "workdir_exists": facts["workdir_exists"],
        "target": facts["target"],
        "sees_directory": facts.get("sees_directory", False),
        "limits": login_limits(),
        "kernel": os.uname().release,
        **memory_kb(root),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "environment": machine_settings(root),
        "problems": problems,
    }


def disks_of(workdir: str) -> dict[str, Work]:
    return {
        # A missing workdir is sent, and then lies below the home of this program.
        "disk": lambda: disks.disk_of(workdir if os.path.isdir(workdir) else files.our_directory()),
        "home": lambda: disks.disk_of(files.our_directory()),
        "shm": disks.shared_memory,
    }


def torch_here(torch: str, workdir: str) -> dict[str, Any]:
    """Return torch's version; if the chosen Python has none, the other Pythons that have it."""
    if torch:
        return {"torch": torch}
    return {
        "torch": "",
        **gather_parts(SECONDS, {"torch_elsewhere": lambda: pythons_with_torch(workdir)})[0],
    }


DISK = {
    "workdir_exists": "the directory {}",
    "target": "the program in {}",
    "software": "where torch is installed",
}


def refuse_unknown(problems: dict[str, str], workdir: str) -> None:
    """Raise a ValueError if a part is missing that every plan needs."""
    for name, what in DISK.items():
        if name in problems:
            raise ValueError(f"{what.format(workdir)}: {problems[name]}; a disk that hangs?")


def network_space() -> int:
    """Return the network namespace: nodes with the same boot and namespace are one machine."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def machine_settings(root: str = "") -> dict[str, str]:
    """Return NCCL's settings of this machine or login; the environment wins, as in NCCL."""
    settings = {}
    for line in sysfs.read_text(root + NCCL_CONF).splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.lstrip().startswith("#"):
            settings[name.strip()] = value.strip()
    settings.update({k: v for k, v in os.environ.items() if k.startswith(OWN_SETTINGS)})
    return settings


def resolve_target(target: Target, workdir: str) -> Target:
    """Return the kind of this program here: "script", "module", "program", or an error."""
    if target.kind != "auto":
        return target
    return Target(*program_at(target.name, workdir))


def gpu_count(root: str = "") -> int:
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if "SLURM_STEP_ID" in os.environ and count.isdigit():
        # Slurm's count is that of this job; /dev shows the GPUs of other jobs as well.
        return int(count)
    in_dev = sum(1 for name in sysfs.list_names(f"{root}/dev") if re.fullmatch(r"nvidia\d+", name))
    return in_dev or amd.count_gpus(root)


def login_limits() -> Limits:
    """Return the limits of this login, which its ranks inherit."""
    return Limits(
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
    )


def memory_kb(root: str = "") -> dict[str, int]:
    sizes = sysfs.read_meminfo(root)
    return {
        "memory_kb": sizes.get("MemTotal", 0) >> 10,
        "memory_available_kb": sizes.get("MemAvailable", 0) >> 10,
    }


# A machine that ran thousands of jobs must not read all of their events.
NEWEST = 64


def find_leftovers() -> tuple[Leftover, ...]:
    """Return the jobs here that have not ended, and whether their supervisors answer."""
    runs = sorted(all_runs(), key=change_time, reverse=True)[:NEWEST]
    unfinished = [run for run in runs if os.path.exists(run.spec) and run.last(Ended) is None]
    return tuple(
        Leftover(job=run.job, alive=answers_still(run))
        for run in job_processes.runs_here(unfinished)
    )


def change_time(run: RunDir) -> float:
    try:
        return os.stat(run.path).st_mtime
    except OSError:
        return 0.0


def answers_still(run: RunDir) -> bool:
    try:
        connect_supervisor(run).close()
    except OSError:
        return False
    return True


def gather_parts(
    seconds: float, parts: Mapping[str, Work]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (results, reasons of missing parts). Waits `seconds` at most for all parts."""
    results: dict[str, Any] = {}
    problems: dict[str, str] = {}
    defects: list[BaseException] = []

    def do(name: str, work: Work) -> None:
        try:
            results[name] = work()
        except (OSError, ValueError) as error:
            problems[name] = str(error)
        # The caller raises it after all threads have ended.
        except BaseException as error:  # noqa: BLE001
            defects.append(error)

    threads = [threading.Thread(target=do, args=part, daemon=True) for part in parts.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for defect in defects:
        raise defect
    found, problems = dict(results), dict(problems)
    for name in parts.keys() - found.keys() - problems.keys():
        problems[name] = f"it did not answer within {seconds:g} s"
    return found, problems


# -- torch, NCCL and drivers, by their files: none is imported ------------------------------------

NCCL_WHEEL = re.compile(r"nvidia_nccl_cu(\d+)-(\d+(?:\.\d+)+)\.dist-info")
NCCL_FILES = (
    "/usr/lib/x86_64-linux-gnu/libnccl.so.2.*",
    "/usr/lib/aarch64-linux-gnu/libnccl.so.2.*",
    "/usr/lib64/libnccl.so.2.*",
    "/usr/local/lib/libnccl.so.2.*",
)
# Usual places of environments, below the working directory, the home, or the root.
ENVIRONMENTS = (
    *("{work}/.venv", "{work}/venv", "{work}/env", "~/.venv", "~/venv", "~/env", "~/venvs/*"),
    *("~/envs/*", "~/.venvs/*", "~/.virtualenvs/*", "~/.conda/envs/*", "~/micromamba/envs/*"),
    *("~/miniconda3", "~/miniforge3", "~/mambaforge", "~/anaconda3", "~/conda"),
    *("~/miniconda3/envs/*", "~/miniforge3/envs/*", "~/mambaforge/envs/*", "~/anaconda3/envs/*"),
    *("~/conda/envs/*", "~/.pyenv/versions/*", "/opt/conda", "/opt/conda/envs/*", "/opt/venv"),
    *("/opt/miniconda3", "/opt/miniconda3/envs/*", "/usr/local"),
)
MOST_PYTHONS = 8


def read_software(root: str = "") -> tuple[str, Software]:
    """Return torch's version, and those of its libraries and of the drivers."""
    directory = torch_home()
    versions = sysfs.read_text(os.path.join(directory, "version.py")) if directory else ""
    cuda, hip = assigned_value(versions, "cuda"), assigned_value(versions, "hip")
    nccl = ""
    if cuda:
        nccl = nccl_version(directory, cuda, root)
    elif hip:
        nccl = rccl_version(root)
    return assigned_value(versions, "__version__"), Software(
        cuda=cuda,
        hip=hip,
        nccl=nccl,
        nvidia_driver=sysfs.read_text(f"{root}/sys/module/nvidia/version"),
        amd_driver=sysfs.read_text(f"{root}/sys/module/amdgpu/version"),
    )


def pythons_with_torch(workdir: str) -> tuple[str, ...]:
    """Return the Pythons here that have torch, with ~ for the home."""
    login = os.path.expanduser("~")
    found: dict[str, None] = {}
    ours = os.path.join(files.our_directory(), "environments/newest")
    work, of_login = glob.escape(workdir), glob.escape(login)
    usual = (p.replace("{work}", work).replace("~", of_login, 1) for p in ENVIRONMENTS)
    for path in (glob.escape(ours), *usual):
        for version in sorted(glob.glob(f"{path}/lib/python3*/site-packages/torch/version.py")):
            python = os.path.join(version.rpartition("/lib/python3")[0], "bin/python")
            if os.access(python, os.X_OK):
                shown = f"~{python[len(login) :]}" if python.startswith(login + "/") else python
                found[shown] = None
    return tuple(found)[:MOST_PYTHONS]


def torch_home() -> str:
    """Return torch's directory without importing it, which takes over a second."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def accelerate_version() -> dict[str, Any]:
    """Return accelerate's version; importing it would import torch."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or not spec.origin:
        return {}
    version = assigned_value(sysfs.read_text(spec.origin), "__version__") or "of an unknown version"
    return {"accelerate": version}


def assigned_value(text: str, name: str) -> str:
    """Return the string assigned to a name: 12.8 for `cuda: Optional[str] = '12.8'`."""
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


def nccl_version(directory: str, cuda: str, root: str = "") -> str:
    """Return the version of the wheel next to torch, or of the system's library."""
    major = cuda.partition(".")[0]
    wheels = filter(None, map(NCCL_WHEEL.fullmatch, sysfs.list_names(os.path.dirname(directory))))
    for match in sorted(wheels, key=lambda wheel: wheel.group(1) != major):
        return match.group(2)
    for pattern in NCCL_FILES:
        for path in glob.glob(root + pattern):
            version = path.partition(".so.")[2]
            if re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
                return version
    return ""


def rccl_version(root: str = "") -> str:
    text = sysfs.read_text(f"{root}/opt/rocm/include/rccl/rccl.h")
    parts = [
        re.search(rf"^#define NCCL_{part} (\d+)", text, re.MULTILINE)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return ".".join(match.group(1) for match in parts if match)
