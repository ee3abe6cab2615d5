"""Examines this machine with commands: GPUs and their users, Xids, code, torch itself.

Not for a launch: it takes as long as its slowest command. Each part has a limit; the reason why
a part is unknown is in `problems`, by the name of the part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.common import files
from orchestrator.common.permissions import user_name
from orchestrator.node.job import processes
from orchestrator.node.job.processes import TICKS, Process
from orchestrator.node.machine import amd, nvidia, sysfs, tool
from orchestrator.node.machine.disks import disk_space
from orchestrator.node.machine.probe import gather_parts
from orchestrator.protocol.facts import Checkup, Gpu, Holder, Load, Torch, User
from orchestrator.protocol.message import decode_value
from orchestrator.protocol.requests.machine import Examine

# Used if the request names no parts; `load` must be requested.
PARTS = ("gpus", "xids", "code", "torch", "names")
LOG_SECONDS = 5.0
TORCH_SECONDS = 60.0
JOURNAL = ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short", "-g", "NVRM: Xid")
LARGEST_FILE_BYTES = 64 << 20
TORCH = """
import json, sys
out = {"python": sys.executable}
try:
    import torch
    out["cuda"], out["hip"] = torch.version.cuda or "", torch.version.hip or ""
    out["available"] = torch.cuda.is_available()
    if out["cuda"] or out["hip"]:
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(out))
"""


def run_checkup(request: Examine, root: str = "") -> Checkup:
    """Return the requested facts, part by part. `root` is put before /sys and /proc by tests."""
    wanted = request.parts or PARTS
    workdir = os.path.expanduser(request.workdir)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "gpus": lambda: gpu_part(root),
        "xids": lambda: xid_part(root),
        "torch": torch_part,
        "load": load_of_users,
        "code": lambda: (
            {"script": program_digest(workdir, request.script)} if request.script else {}
        ),
        "names": lambda: {"names": names_here()},
    }
    # A part's own limits expire first, as their messages name the command that was late.
    parts = {part: work for part, work in works.items() if part in wanted}
    found, problems = gather_parts(TORCH_SECONDS + LOG_SECONDS, parts)
    fields: dict[str, Any] = {}
    for part, values in found.items():
        problems[part] = values.pop("problem", "")
        fields.update(values)
    return Checkup(**fields, problems={part: words for part, words in problems.items() if words})


def has_nvidia(root: str) -> bool:
    places = ("dev/nvidiactl", "proc/driver/nvidia")
    return any(os.path.exists(f"{root}/{place}") for place in places)


# -- the parts, each with what went wrong as its "problem" ----------------------------------------


def gpu_part(root: str) -> dict[str, Any]:
    """Return the GPUs and their processes; None if a tool gave no answer."""
    known, holders = amd.read_gpus(root), amd.read_processes(root)
    problem, told = "", True
    if has_nvidia(root):
        rows, said = nvidia.query_smi("gpu", nvidia.GPU_FIELDS, nvidia.QUERY_SECONDS)
        computing, unknown = list[Holder](), said.problem
        # After a failure, the next query would take as long again.
        if rows or not said.problem:
            computing, unknown = nvidia.computing_processes(nvidia.QUERY_SECONDS)
        # The driver's files contain everything except the processes.
        of_nvidia = nvidia.gpus_of_rows(rows) or [
            Gpu(index=at, **vars(card)) for at, card in enumerate(nvidia.read_cards(root))
        ]
        known, holders = [*of_nvidia, *known], [*computing, *holders]
        told = not unknown
        problem = "; ".join(filter(None, [said.problem or unknown, *nvidia.lost_gpus(said.out)]))
    whose = []
    for holder in holders:
        process = processes.find_process(holder.pid)
        since = processes.start_time(process) if process else None
        whose.append(holder.replace(**(owner_of_process(holder.pid) or {}), since=since))
    gpus = tuple(known) if known or told else None
    return {"gpus": gpus, "holders": tuple(whose) if told else None, "problem": problem}


def xid_part(root: str) -> dict[str, Any]:
    """Return the Xids of the kernel's log or the journal: often a user may read only one."""
    problems = []
    for argv in (("dmesg",), JOURNAL) if has_nvidia(root) else ():
        output = tool.run_tool(argv, LOG_SECONDS)
        if not output.problem or output.problem == "journalctl ended with exit code 1":
            # journalctl returns grep's exit code, so 1 means no match.
            return {"xids": tuple(nvidia.find_xids(output.out))}
        problems.append(output.problem)
    return {"xids": (), "problem": "; ".join(problems)}


def program_digest(workdir: str, script: str) -> str:
    """Return the SHA-256 of the program, to compare nodes where there is no git."""
    path = os.path.join(workdir, script)
    if not os.path.isfile(path) or os.path.getsize(path) > LARGEST_FILE_BYTES:
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def torch_part() -> dict[str, Any]:
    """Return the facts of importing torch: the last line, because site files may print others."""
    quiet = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    output = tool.run_tool([sys.executable, "-c", TORCH], TORCH_SECONDS, quiet)
    lines = output.out.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        torch = decode_value(Torch, json.loads(lines[-1]))
        return {"torch": torch, "problem": torch.error or output.problem}
    return {"problem": output.problem or "it said nothing"}


def names_here() -> tuple[str, ...]:
    """Return the addresses of this machine's own name: 127.0.1.1 misleads other machines."""
    name = socket.gethostname()
    return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))


# -- who uses the processors: two looks at /proc, a quarter of a second apart ---------------------

LOOK_SECONDS = 0.25
# Users below this fraction of a core are left out, except jobs of this program.
LEAST = 0.05
MOST_USERS = 20
NOTHING: dict[str, Any] = {"name": "", "cores": 0.0, "memory": 0, "processes": 0}


def load_of_users(seconds: float = LOOK_SECONDS) -> dict[str, Any]:
    """Return the cores that each user's processes use now, the greatest first."""
    before, busy_before, began = processes.all_processes(), busy_ticks(), time.monotonic()
    time.sleep(seconds)
    after, busy_after, took = processes.all_processes(), busy_ticks(), time.monotonic() - began
    users: dict[tuple[str, str], User] = {}
    # The cores that the busiest process of a user and job has.
    busiest: dict[tuple[str, str], float] = {}
    # A process that inherits an ending one gets the time of its whole life: never more than `most`.
    ticks, most = ticks_between(before, after), os.cpu_count() or 1
    for pid, now in after.items():
        used = min(max(0, ticks[pid]) / TICKS / took, most)
        # The jobs of this login are listed even while they are idle.
        ours = processes.owner_of(pid) == os.getuid()
        whose = owner_of_process(pid) if ours or used >= LEAST / 4 else None
        if whose is None or pid == os.getpid():
            continue
        key = whose["user"], whose["job"]
        user = users.get(key) or User(**NOTHING, **whose, pid=pid, since=time.time())
        if used > busiest.get(key, -1.0):
            busiest[key] = used
            user = user.replace(name=now.name, pid=pid)
            user = user if user.job else user.replace(since=processes.start_time(now))
        if user.job:
            user = user.replace(since=min(user.since, processes.start_time(now)))
        users[key] = user.replace(
            cores=user.cores + used,
            memory=user.memory + now.memory,
            processes=user.processes + 1,
        )
    listed = sorted(users.values(), key=lambda user: -user.cores)
    named = [user for user in listed if user.cores >= LEAST or user.job][:MOST_USERS]
    cores, cpus = sum(user.cores for user in listed), len(os.sched_getaffinity(0))
    unseen = max(0.0, (busy_after - busy_before) / TICKS / took - cores)
    # The directory is missing before the first job.
    disk = dict(zip(("disk_free", "disk"), disk_space(files.our_directory())))
    more = {**machine_memory(), **disk, **network_traffic()}
    return {"load": Load(cores + unseen, tuple(named), cpus, unseen=unseen, **more)}


def ticks_between(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[int, int]:
    """Return the processor time of each living process, with that of children which it waited for.

    Many programs end between two looks, as those of a shell script do. A child may have used time
    before the first look: this is subtracted from its nearest ancestor that lives.
    """
    used = {pid: now.ticks + now.waited for pid, now in after.items()}
    for was in before.values():
        heir: Process | None = was
        while heir is not None and (heir.pid not in after or after[heir.pid].key != heir.key):
            heir = before.get(heir.parent)
        if heir is not None:
            used[heir.pid] -= was.ticks + was.waited
    return used


def busy_ticks() -> int:
    """Return the time that all programs have used on this login's processors."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in sysfs.read_text("/proc/stat", 1 << 20).splitlines())
    return sum(sum(map(int, words[1:4])) for words in lines if words and words[0] in ours)


def machine_memory() -> dict[str, int]:
    """Return the machine's memory in bytes, from the kernel."""
    fields = sysfs.read_meminfo()
    return {
        "memory": fields.get("MemTotal", 0),
        "available": fields.get("MemAvailable", 0),
        "swapped": fields.get("SwapTotal", 0) - fields.get("SwapFree", 0),
    }


def network_traffic() -> dict[str, Any]:
    """Return the bytes of all networks; those of a bridge or bond are counted on its ports."""
    counts = sysfs.network_bytes().values()
    received, sent = (sum(count[way] for count in counts) for way in (0, 1))
    return {"received": received, "sent": sent, "at": time.monotonic()}


def owner_of_process(pid: int) -> dict[str, Any] | None:
    """Return the user and the job of a process, as far as this login may inspect it."""
    uid = processes.owner_of(pid)
    # The process has ended, or lives in another container.
    if uid < 0:
        return None
    tags = dict(entry.partition(b"=")[::2] for entry in processes.environment_of(pid))
    return {"user": user_name(uid), "job": os.fsdecode(tags.get(b"ORCHESTRATOR_JOB", b""))}
