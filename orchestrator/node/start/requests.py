"""Answers a head's requests to start a node's part of a job, the first time and again."""

from __future__ import annotations

import math
import os
import shutil
import signal

from orchestrator.node.job import resume_dir
from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.session import ServerSession, answers
from orchestrator.node.start import claims, lock_table, start
from orchestrator.node.start.claims import Claims
from orchestrator.node.warm.session import StandbySession
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.start import (
    Claim,
    Claimed,
    Hook,
    Hooked,
    LockTableState,
    ReadLockTable,
    Release,
    Start,
    StartedHere,
    TakenPorts,
    TakePorts,
    Unclaim,
    Wait,
)


@answers(Hook)
def hook(session: ServerSession, request: Hook) -> Hooked:
    changed, unset = run_hook(request.text, request.env, request.workdir, session.umask)
    return Hooked(env=changed, unset=tuple(unset))


@answers(Start)
def start_part(session: ServerSession, request: Start) -> StartedHere:
    if request.spec is not None and request.later:
        return start.store_part(session, request.spec)
    return start.start_part(session, request)


@answers(TakePorts)
def take_ports(session: ServerSession, request: TakePorts) -> TakenPorts:
    ports = session.of(Ports)
    ports.hold(request.port)
    return TakenPorts(port=ports.number, peers_port=ports.peers_number)


@answers(Release)
def release(session: ServerSession, request: Release) -> Nothing:
    from orchestrator.node.warm import standbys

    standbys.end_of_job(request.job)
    # There is no next attempt.
    session.of(StandbySession).next_look = math.inf
    session.of(Claims).drop()
    resume_dir.remove_resume_dir(PartDir(request.job, request.part))
    return Nothing()


@answers(Claim)
def claim(session: ServerSession, request: Claim) -> Claimed:
    # A later attempt uses the request stored in its first spec.
    devices = PartDir(*request.part).read_spec().devices if request.part else request.devices
    if devices is None:
        return Claimed(held=True)
    claimed = session.of(Claims).take(devices, request.patience, new=request.part is None)
    return claimed.replace(machine=lock_table.machine_identity())


@answers(Unclaim)
def unclaim(session: ServerSession, request: Unclaim) -> Nothing:
    session.of(Claims).let_go()
    return Nothing()


@answers(Wait)
def wait(session: ServerSession, request: Wait) -> Nothing:
    session.of(Claims).wait(request.entry)
    return Nothing()


@answers(ReadLockTable)
def read_lock_table(session: ServerSession, request: ReadLockTable) -> LockTableState:
    return claims.read_table(session, request)


# -- a shell file for each node: the variables it exports go to the job's environment ----------

HOOK_SECONDS = 60
# The shell sets and unsets these itself.
SHELL_OWN = {"_", "SHLVL", "PWD", "OLDPWD", "PS1", "PS2"}
# Only the environment goes to standard output; the file's own output goes to standard error.
# `. file || ...` would disable the file's own `set -e`, so the exit code is tested afterwards.
SCRIPT = "exec 3>&1 1>&2; . /dev/stdin; case $? in 0) exec env -0 >&3;; *) exit $?;; esac"


class HookError(RuntimeError):
    """The hook failed on this node."""


def run_hook(
    text: str, env: dict[str, str], workdir: str, umask: int = -1
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that the hook (set, unset), with `env` added to this environment."""
    # A start without a hook does not need these imports.
    import subprocess
    import tempfile

    before = {**os.environ, **env}
    # Files, not pipes: a process that the hook leaves running could hold a pipe open forever.
    with tempfile.TemporaryFile() as exported, tempfile.TemporaryFile() as errors:
        shell = subprocess.Popen(
            [shutil.which("bash") or "/bin/sh", "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=exported,
            stderr=errors,
            env=before,
            cwd=workdir if os.path.isdir(workdir) else None,
            start_new_session=True,
            umask=umask,
        )
        try:
            shell.communicate(text.encode("utf-8", "surrogateescape"), HOOK_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            raise HookError(f"did not end within {HOOK_SECONDS} s") from error
        for file in (exported, errors):
            file.seek(0)
        raw, message = exported.read(), errors.read().decode("utf-8", "replace").strip()[-2000:]
    if shell.returncode != 0 or not raw:
        code = shell.returncode
        left = f"ended with exit code {code}" if code else "left by `exit`"
        raise HookError(left + (f": {message}" if message else ""))
    after = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            after[os.fsdecode(name)] = os.fsdecode(value)
    changed = {k: v for k, v in after.items() if before.get(k) != v and k not in SHELL_OWN}
    return changed, [name for name in before if name not in after and name not in SHELL_OWN]
