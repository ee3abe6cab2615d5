"""Turn a task of srun into a rank; torchrun's ranks already have all that torch needs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

from orchestrator.common import slurm_environment
from orchestrator.common.errors import CheckFailed


def take_place() -> None:
    """Turn a task of srun into a rank; keep whatever torchrun or the user has set."""
    if "RANK" in os.environ:
        return
    task = slurm_environment.task(os.environ)
    if task is None:
        tasks = slurm_environment.alone_by_mistake(os.environ)
        if tasks:
            tell(f"this process runs alone; to start all {tasks} tasks, put srun before python")
        return
    variables = slurm_environment.variables(task, os.environ)
    if task.world > 1:
        variables["MASTER_ADDR"] = address_of(variables["MASTER_ADDR"])
    os.environ.update(variables)
    if task.rank == 0:
        master = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        tell(f"ranks from Slurm: {task.world} tasks of srun, master {master}")


def address_of(host: str) -> str:
    """Return the host's name, or the address that Slurm has for a name only it knows."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        pass
    if shutil.which("scontrol") is not None:
        asked = ["scontrol", "--oneliner", "show", "node", host]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
        match = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
        if match is not None:
            return match[1]
    raise CheckFailed(
        f"the name of the first node, {host}, has no address here",
        "export MASTER_ADDR=ADDRESS before srun",
    )


def tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
