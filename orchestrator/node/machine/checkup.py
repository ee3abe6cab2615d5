"""Looks closer at this machine, with commands: GPUs and who uses them, Xids, code, torch itself.

Not for a launch: it takes as long as its slowest command. Each part has a limit; why something
cannot be found out is in `problems`, by the name of the part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from orchestrator.node.machine.gpus import amd, nvidia
from orchestrator.node.machine.load import load, owner, started
from orchestrator.node.machine.probe import gather
from orchestrator.node.machine.tool import Command, Output, run_all
from orchestrator.protocol.facts import Checkup, Gpu, Holder, Torch, Xid
from orchestrator.protocol.message import decode
from orchestrator.protocol.requests.machine import Examine

PARTS = ("gpus", "xids", "code", "torch", "names")  # where none is named; `load` has to be
GPU_SECONDS = 20.0  # without persistence mode the driver is loaded for every query
LOG_SECONDS = 5.0
GIT_SECONDS = 10.0  # `git status` of a large tree on a network disk
TORCH_SECONDS = 60.0
NAME_SECONDS = 5.0
LARGEST_FILE_BYTES = 64 << 20
TORCH = """
import json, sys
out = {"python": sys.executable}
try:
    import torch
    out["torch"] = torch.__version__
    out["cuda"], out["hip"] = torch.version.cuda or "", torch.version.hip or ""
    out["available"] = torch.cuda.is_available()
    out["gpus"] = torch.cuda.device_count()
    if out["cuda"] or out["hip"]:
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(out))
"""


def checkup(request: Examine, root: str = "") -> Checkup:
    """Return what was asked for, part by part. `root` stands before /sys and /proc, for tests."""
    wanted = request.parts or PARTS
    workdir = os.path.expanduser(request.workdir)
    script = request.script
    outputs = run_all(commands(wanted, workdir, root))
    fields: dict[str, Any] = {}
    problems: dict[str, str] = {}
    if "gpus" in wanted:
        fields["gpus"], fields["holders"], problems["gpus"] = gpu_part(outputs, root)
    if "xids" in wanted:
        fields["xids"], problems["xids"] = xid_part(outputs)
    if "torch" in wanted:
        fields["torch"], problems["torch"] = torch_part(outputs)
    others: dict[str, Callable[[], Any]] = {"load": load} if "load" in wanted else {}
    if "code" in wanted and script:
        others["script"] = lambda: digest(workdir, script)
    if "names" in wanted:
        others["names"] = names_here
    more, failed = gather(NAME_SECONDS, others)
    problems.update(failed)
    problems = {part: reason for part, reason in problems.items() if reason}
    return Checkup(**fields, **more, problems=problems)


def commands(wanted: Any, workdir: str, root: str) -> dict[str, Command]:
    tools: dict[str, Command] = {}
    nvidia_here = bool(nvidia.cards(root)) or any_nvidia(root)
    if "gpus" in wanted and nvidia_here:
        tools["gpus"] = Command(nvidia.query("gpu", nvidia.GPU_FIELDS), GPU_SECONDS)
        tools["more"] = Command(nvidia.query("gpu", nvidia.MORE_FIELDS), GPU_SECONDS)
        tools["apps"] = Command(nvidia.query("compute-apps", nvidia.APP_FIELDS), GPU_SECONDS)
    if "xids" in wanted and nvidia_here:
        tools["dmesg"] = Command(["dmesg"], LOG_SECONDS)
        journal = ["journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short", "-g", "NVRM: Xid"]
        tools["journal"] = Command(journal, LOG_SECONDS)
    if "torch" in wanted:
        quiet = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
        tools["torch"] = Command([sys.executable, "-c", TORCH], TORCH_SECONDS, quiet)
    return tools


def any_nvidia(root: str) -> bool:
    return os.path.exists(f"{root}/dev/nvidiactl") or os.path.isdir(f"{root}/proc/driver/nvidia")


# -- the parts ------------------------------------------------------------------------------------


def gpu_part(
    outputs: dict[str, Output], root: str
) -> tuple[tuple[Gpu, ...] | None, tuple[Holder, ...] | None, str]:
    """Return (GPUs, who holds them, what went wrong); None for what a tool did not tell."""
    known, holders = amd.gpus(root), amd.processes(root)
    problem, told = "", True
    if "gpus" in outputs:
        text, extra = outputs["gpus"].out, nvidia.more(outputs["more"].out)
        of_nvidia = [gpu.replace(**extra.get(gpu.uuid, {})) for gpu in nvidia.gpus(text)]
        # The driver's files know all but the processes.
        files = enumerate(nvidia.cards(root))
        known = [*(of_nvidia or [Gpu(index=at, **vars(card)) for at, card in files]), *known]
        holders = [*nvidia.processes(outputs["apps"].out), *holders]
        told = not outputs["apps"].problem
        problems = [outputs["gpus"].problem or outputs["apps"].problem, *nvidia.lost(text)]
        problem = "; ".join(filter(None, problems))
    whose = [
        holder.replace(**(owner(holder.pid) or {}), since=started(holder.pid)) for holder in holders
    ]
    return tuple(known) if known or told else None, tuple(whose) if told else None, problem


def xid_part(outputs: dict[str, Output]) -> tuple[tuple[Xid, ...], str]:
    """Read the kernel's log, or the journal: often a user may read only one of them, or none."""
    if "dmesg" not in outputs:
        return (), ""
    for name in ("dmesg", "journal"):
        if not outputs[name].problem:
            return tuple(nvidia.xids(outputs[name].out)), ""
    if outputs["journal"].problem.endswith("exit code 1"):  # grep's: it found none
        return (), ""
    return (), "; ".join(outputs[name].problem for name in ("dmesg", "journal"))


def digest(workdir: str, script: str) -> str:
    """Return the sha256 of the program, to compare where there is no git."""
    path = os.path.join(workdir, script)
    if not os.path.isfile(path) or os.path.getsize(path) > LARGEST_FILE_BYTES:
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def torch_part(outputs: dict[str, Output]) -> tuple[Torch | None, str]:
    """Return what importing torch gives: the last line, because site files may print others."""
    output = outputs["torch"]
    lines = output.out.strip().splitlines()
    with contextlib.suppress(ValueError, IndexError):
        torch = decode(Torch, json.loads(lines[-1]))
        return torch, torch.error or output.problem
    return None, output.problem or "it said nothing"


def names_here() -> tuple[str, ...]:
    """Resolve this machine's own name: 127.0.1.1 misleads whoever is sent there."""
    name = socket.gethostname()
    return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}))
