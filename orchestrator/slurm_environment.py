"""What Slurm's environment says, read without asking Slurm: lists of hosts, the nodes of an
allocation, the place of a task. Pure. For the head and for every rank."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import CheckFailed

MOST_HOSTS = 65536
PART = re.compile(r"([^\[\],]+)|\[([^\[\]]*)\]")
FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels give to anybody


class BadHostlist(ValueError):
    """Not a list of hosts as Slurm writes them."""


def hosts(text: str) -> list[str]:
    """`n[1-2,07-09],gpu3` -> n1 n2 n07 n08 n09 gpu3, in Slurm's order."""
    found: list[str] = []
    for word in words(text):
        grown = [""]
        place = 0
        while place < len(word):
            match = PART.match(word, place)
            if match is None:
                raise BadHostlist(f"{word!r} in {text!r} is not a name of hosts")
            tails = [match[1]] if match[1] is not None else numbers(match[2], text)
            if len(grown) * len(tails) > MOST_HOSTS:
                raise BadHostlist(f"{word!r} names more than {MOST_HOSTS} hosts")
            grown = [head + tail for head in grown for tail in tails]
            place = match.end()
        found += grown
    return found


def words(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets."""
    found = [""]
    depth = 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    if depth or not all(found):
        raise BadHostlist(f"{text!r} is not a list of hosts")
    return found


def numbers(text: str, whole: str) -> list[str]:
    """`1-3,07` -> 1 2 3 07; leading zeros are part of a name."""
    found: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise BadHostlist(f"[{text}] in {whole!r} is not a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MOST_HOSTS:
            raise BadHostlist(f"[{text}] in {whole!r} names more than {MOST_HOSTS} hosts")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


# -- an allocation ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What salloc or sbatch gave to the job that this process is in."""

    job: str
    nodes: tuple[str, ...]
    tasks_per_node: int | None  # asked for with --ntasks-per-node


def given(environ: Mapping[str, str]) -> Given | None:
    """The allocation of this process, or None outside of one; CheckFailed for half of one."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job and not listed:
        return None
    missing = "SLURM_JOB_NODELIST" if job else "SLURM_JOB_ID"
    if not job or not listed:
        raise half(f"{'SLURM_JOB_ID' if job else 'SLURM_JOB_NODELIST'} is set and {missing} is not")
    if not re.fullmatch(r"[0-9]+", job):
        raise half(f"SLURM_JOB_ID is {job!r}, which is no number of a job")
    try:
        nodes = hosts(listed)
    except BadHostlist as error:
        raise half(f"SLURM_JOB_NODELIST cannot be read: {error}") from error
    told = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    if told and told != str(len(nodes)):
        raise half(f"SLURM_JOB_NODELIST has {len(nodes)} nodes and SLURM_JOB_NUM_NODES is {told}")
    tasks = environ.get("SLURM_NTASKS_PER_NODE", "")
    return Given(job, tuple(nodes), int(tasks) if tasks.isdigit() else None)


def half(what: str) -> CheckFailed:
    return CheckFailed(
        f"half a Slurm environment: {what}",
        "start it inside salloc or sbatch, with all of their SLURM_ variables; or, to use SSH,"
        " unset them",
    )


# -- a task -----------------------------------------------------------------------------------

TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Task:
    """One of the processes that one srun started."""

    rank: int
    world: int
    local: int
    node: int
    master: str  # the first node of the step
    port: int


def task(environ: Mapping[str, str]) -> Task | None:
    """The task that this process is, or None where srun did not start it as a rank."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    missing = [name for name in TASK if name not in environ]
    missing += [] if listed else ["SLURM_STEP_NODELIST"]
    if missing:
        raise half(f"srun started this process, but {' and '.join(missing)} is not set")
    bad = [f"{name}={environ[name]}" for name in TASK if not environ[name].isdigit()]
    if bad:
        raise half(f"{' and '.join(bad)} is no number")
    rank, local, node, world = (int(environ[name]) for name in TASK)
    if rank >= world:
        raise half(f"SLURM_PROCID is {rank} and SLURM_STEP_NUM_TASKS only {world}")
    try:
        master = hosts(str(listed))[0]
    except BadHostlist as error:
        raise half(f"SLURM_STEP_NODELIST cannot be read: {error}") from error
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return Task(rank, world, local, node, master, FIRST_PORT + zlib.crc32(step.encode()) % PORTS)


def alone_by_mistake(environ: Mapping[str, str]) -> int:
    """Of how many tasks somebody starts only one, without srun; 0 where all is well."""
    in_batch = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    tasks = environ.get("SLURM_NTASKS", "")
    return int(tasks) if in_batch and tasks.isdigit() and int(tasks) > 1 else 0


def variables(one: Task, environ: Mapping[str, str]) -> dict[str, str]:
    """What torch wants to know, in torch's names. MASTER_ADDR is still a name of Slurm's."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    # With --gpus-per-task=1 every task sees one GPU, and for each of them it is number 0.
    alone = bool(visible) and "," not in visible
    return {
        "RANK": str(one.rank),
        "WORLD_SIZE": str(one.world),
        "LOCAL_RANK": "0" if alone else str(one.local),
        "GROUP_RANK": str(one.node),
        "MASTER_ADDR": environ.get("MASTER_ADDR", one.master),
        "MASTER_PORT": environ.get("MASTER_PORT", str(one.port)),
    }
