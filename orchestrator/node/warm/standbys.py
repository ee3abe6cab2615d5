"""Starts, finds, takes and ends the standbys of this user on this node.

Each has a directory ~/.orchestrator/warm/KEY, 0700, with its socket and `standby.json`. That file's
time is when the process exits. A caller that takes or ends one renames its directory first, so no
two callers do. Machines may share homes: a standby belongs to the machine that it runs on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, NamedTuple

from orchestrator.common import files, hiding
from orchestrator.node.job import processes
from orchestrator.node.job.agent_environment import agent_environment
from orchestrator.node.job.processes import LOOK_SECONDS, OPTIONS, Process
from orchestrator.node.job.run_directory import RunDir, connect_in, listen_in
from orchestrator.node.server.session import LIBRARY
from orchestrator.node.warm.standby import receive_message, send_message
from orchestrator.protocol.message import (
    Message,
    Nonsense,
    decode_value,
    encode_value,
    parse_object,
)
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import DEATH_SECONDS, STANDBY_SECONDS

PROGRAM = os.path.join("orchestrator", "node", "warm", "standby.py")
# Its value reserves space for the variables of a job.
ROOM_VARIABLE = "ORCHESTRATOR_ROOM"
ROOM_BYTES = 1 << 15
COMMAND_ROOM_BYTES = 4096
# A directory without a process is removed after this time.
FORGOTTEN_SECONDS = 86400.0
# These differ for each login and each job; no import of torch depends on them.
OF_A_LAUNCH = re.compile(
    r"ORCHESTRATOR_.*|SSH_.*|XDG_SESSION_.*|KRB5CCNAME|PWD|OLDPWD|SHLVL|_"
    r"|NODE_RANK|NODE_IP|NNODES|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|TORCHINDUCTOR_CACHE_DIR"
    r"|TRITON_CACHE_DIR"
)
NAMESPACES = ("mnt", "pid", "net", "user", "ipc", "uts")
# Lines of /proc/self/status that a process inherits.
INHERITED = {
    *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp"),
    *("SigIgn", "SigBlk", "Cpus_allowed_list", "Mems_allowed_list"),
}
# The control group of one login.
SESSION = re.compile(r"session-[^/]*[.]scope")


class Standby(Message):
    """One standby, from `standby.json` in its directory."""

    machine: str
    # The job whose next attempt may use it; empty for any launch with --warm.
    job: str
    python: str
    since: float  # Unix time
    pid: int = 0
    # In clock ticks since boot. Together with the PID it identifies one process forever.
    started: int = 0
    directory: str = ""

    @property
    def ready(self) -> bool:
        return os.path.exists(os.path.join(self.directory, "ready"))

    @property
    def until(self) -> float:
        return modified_time(os.path.join(self.directory, "standby.json"))


class WarmSupervisor(NamedTuple):
    """A supervisor that was a standby. It reports its start on `stdout`, as a cold one does."""

    pid: int
    stdout: IO[bytes]
    kill: Callable[[], object]


# -- what it is started with ------------------------------------------------------------------


def why_unsuitable(spec: Spec, environ: Mapping[str, str]) -> str:
    """Return the reason why a job like this one can never start warm, or an empty string."""
    if spec.start != "fork":
        return "its ranks do not start from torchrun's process (start: plain, --no-torchrun)"
    if "SLURM_STEP_ID" in environ:
        return "Slurm ends all processes of a job with the job"
    return ""


def variables_of(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a standby's variables for this job, without its secrets and its own variables."""
    variables = agent_environment(spec, "", environ)
    values = hiding.secrets_of_environment(variables, spec.secrets)
    return {
        name: value
        for name, value in sorted(variables.items())
        if not OF_A_LAUNCH.fullmatch(name)
        and not hiding.NAME.search(name)
        and value == hiding.hide_secrets(hiding.redacted_text(value), values)
    }


def login_identity(umask: int) -> str:
    """Return the properties that a process inherits from its login and keeps through exec."""
    lines = file_text("/proc/self/status").splitlines()
    status = [line for line in lines if line.partition(":")[0] in INHERITED]
    hard = [hard for _, _, hard in processes.own_limits()]
    group = SESSION.sub("session", file_text("/proc/self/cgroup"))
    return str((umask, status, os.getpriority(os.PRIO_PROCESS, 0), hard, group))


def machine_identity() -> str:
    """Return an identifier of this machine since its boot and of this process's namespaces."""
    inodes = [os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES]
    return " ".join([file_text("/proc/sys/kernel/random/boot_id").strip(), *map(str, inodes)])


def job_of(spec: Spec) -> str:
    """Return the job whose next attempt alone may use the standby; empty with --warm."""
    return spec.job if spec.restarts and not spec.warm else ""


def path_of(spec: Spec, environ: Mapping[str, str], umask: int) -> str:
    """Return the directory of a standby for jobs like this; its name is a hash of shared facts."""
    python = os.path.realpath(spec.agent[0])
    words = [
        machine_identity(),
        job_of(spec),
        LIBRARY,
        spec.agent[0],
        python,
        modified_time(python),
    ]
    words += [login_identity(umask), *sorted(variables_of(spec, environ).items())]
    name = hashlib.sha256(json.dumps(words).encode("ascii")).hexdigest()[:16]
    return os.path.join(standbys_root(), name)


def standbys_root() -> str:
    return os.path.join(files.our_directory(), "warm")


def file_text(path: str) -> str:
    return os.fsdecode(processes.file_contents(path))


def modified_time(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


# -- which there are --------------------------------------------------------------------------


def find_standbys() -> list[Standby]:
    """Return the standbys of this machine, the oldest first; files of dead ones are removed."""
    try:
        names = os.listdir(standbys_root())
    except OSError:
        return []
    found = []
    for name in names:
        path = os.path.join(standbys_root(), name)
        standby = read_standby(path)
        if standby is not None and standby.machine == machine_identity():
            if process_of(standby) is None:
                shutil.rmtree(path, ignore_errors=True)
            elif "." not in name:
                found.append(standby)
        elif (
            time.time()
            > max(modified_time(path), standby.until if standby else 0) + FORGOTTEN_SECONDS
        ):
            shutil.rmtree(path, ignore_errors=True)
    return sorted(found, key=lambda standby: standby.since)


def read_standby(path: str) -> Standby | None:
    try:
        with open(os.path.join(path, "standby.json"), "rb") as file:
            return decode_value(Standby, parse_object(file.read()), newer=True).replace(
                directory=path
            )
    except (OSError, Nonsense):
        return None


def process_of(standby: Standby) -> Process | None:
    """Return the process of a standby, or None if it has ended."""
    now = processes.find_process(standby.pid)
    lives = now is not None and now.key == (standby.pid, standby.started) and not now.is_dead
    return now if lives else None


# -- starting and ending ----------------------------------------------------------------------


def start_standby(spec: Spec, environ: Mapping[str, str], umask: int, least: float = 0.0) -> None:
    """Start a standby for jobs like this one unless one waits already. Returns without waiting.

    It stays for the time that the job requested, and for at least `least` seconds.
    """
    with contextlib.suppress(OSError, ValueError):
        if why_unsuitable(spec, environ):
            return
        path, until = path_of(spec, environ, umask), time.time() + max(spec.warm, least)
        others = find_standbys()
        for standby in others:
            if standby.directory == path:
                os.utime(os.path.join(path, "standby.json"), (until, until))
                return
        # A node has two standbys at most.
        for standby in others[:-1]:
            end_standby(standby)
        os.makedirs(standbys_root(), mode=0o700, exist_ok=True)
        spawn_standby(path, until, spec, environ)


def spawn_standby(
    path: str,
    until: float,
    spec: Spec,
    environ: Mapping[str, str],
) -> None:
    """Start the process in a new directory; a concurrent start may have created the same name."""
    # A start from a standby does not need this import.
    import subprocess

    new = f"{path}.{os.urandom(4).hex()}"
    os.mkdir(new, 0o700)
    try:
        with listen_in(new) as server:
            room = " " * (COMMAND_ROOM_BYTES + sum(map(len, spec.command)))
            more = " " * (ROOM_BYTES + sum(len(n) + len(v) for n, v in spec.env.items()))
            words = [path, str(server.fileno()), room]
            process = subprocess.Popen(
                [spec.agent[0], "-u", os.path.join(LIBRARY, PROGRAM), *words],
                env={**variables_of(spec, environ), ROOM_VARIABLE: more[:100_000]},
                cwd=new,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[server.fileno()],
            )
        now = processes.find_process(process.pid)
        standby = Standby(
            machine=machine_identity(),
            job=job_of(spec),
            python=spec.agent[0],
            since=time.time(),
            pid=process.pid,
            started=now.started if now else 0,
        )
        file = os.path.join(new, "standby.json")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as record:
            json.dump(encode_value(standby), record)
        os.utime(file, (until, until))
        os.rename(new, path)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise


def claim_standby(standby: Standby) -> Standby | None:
    """Return the standby, reserved for this caller by a rename, or None if another has it."""
    own = f"{standby.directory}.{os.urandom(4).hex()}"
    try:
        os.rename(standby.directory, own)
    except OSError:
        return None
    return standby.replace(directory=own)


def end_standby(standby: Standby) -> bool:
    """Kill a standby that still waits; return False if its process survives."""
    claimed = claim_standby(standby)
    return claimed is None or end_claimed(claimed)


def end_claimed(standby: Standby) -> bool:
    deadline = time.monotonic() + DEATH_SECONDS
    while (process := process_of(standby)) is not None and time.monotonic() < deadline:
        processes.send_signal(process, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    shutil.rmtree(standby.directory, ignore_errors=True)
    return process is None


def end_of_job(job: str) -> None:
    """End the standby of a job that is over for good."""
    for standby in find_standbys():
        if standby.job == job:
            end_standby(standby)


# -- a job ------------------------------------------------------------------------------------


def start_from_standby(
    run: RunDir, spec: Spec, environ: Mapping[str, str], umask: int, files: Sequence[int]
) -> tuple[WarmSupervisor | None, str]:
    """Start the job's supervisor and torchrun from a fitting standby, or return why none does."""
    reason = why_unsuitable(spec, environ)
    if reason:
        return None, f"cold start: {reason}"
    path = path_of(spec, environ, umask)
    there = [standby for standby in find_standbys() if standby.job == job_of(spec)]
    for standby in there:
        claimed = claim_standby(standby) if standby.directory == path else None
        if claimed is not None:
            return hand_job(claimed, run, environ, files)
    reason = "what waited there was started otherwise" if there else "nothing waited there"
    for standby in there if spec.warm else ():
        end_standby(standby)
    return None, f"cold start: {reason}"


def hand_job(
    standby: Standby, run: RunDir, environ: Mapping[str, str], files: Sequence[int]
) -> tuple[WarmSupervisor | None, str]:
    """Send a claimed standby its job; one that refuses is ended before the cold start.

    `files` are passed with the numbers that they have here; the first is for errors.
    """
    process, reason = process_of(standby), "the warm process did not answer"
    reading, writing = os.pipe()
    order = {
        "program": [sys.executable, *OPTIONS, LIBRARY, "forked"],
        "job": ["supervise", *run.words],
        "environ": dict(environ),
        "directory": os.getcwd(),
        "limits": processes.own_limits(),
        "numbers": [1, 2, *files[1:]],
    }
    try:
        with connect_in(standby.directory, seconds=STANDBY_SECONDS) as client:
            send_message(client, order, [writing, *files])
            answer, _ = receive_message(client)
            reason = str(answer.get("no", reason))
            if "yes" in answer and process is not None:
                shutil.rmtree(standby.directory, ignore_errors=True)
                warm = WarmSupervisor(
                    pid=process.pid,
                    stdout=os.fdopen(reading, "rb", buffering=0),
                    kill=partial(processes.send_signal, process, signal.SIGKILL),
                )
                return warm, ""
    except (OSError, EOFError, ValueError):
        pass
    finally:
        os.close(writing)
    os.close(reading)
    end_claimed(standby)
    return None, f"cold start: {reason}"
