"""Starts, lists and ends the warm processes of this node: pairs of a supervisor and its agent.

Each has a directory ~/.orchestrator/warm/KEY, 0700, with its socket and `pair.json`. Homes may be
shared by machines: a pair is looked at by the machine that it runs on, and by no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.node.job import job_processes, processes
from orchestrator.node.job.processes import Process, ProcessSet
from orchestrator.node.job.run_directory import RunDir, connect_in, home, listen_in
from orchestrator.node.warm import frames, setting
from orchestrator.protocol.message import Message, Nonsense, decode, encode, parse
from orchestrator.protocol.spec import Spec

TOKEN_VARIABLE = "ORCHESTRATOR_WARM"  # in the environment of the agent, while it waits
ROOM_VARIABLE = "ORCHESTRATOR_ROOM"  # its value is room for the variables of a job
ROOM_BYTES = 1 << 15
COMMAND_ROOM_BYTES = 4096
MOST = 2  # on a node
ANSWER_SECONDS = 2.0
END_SECONDS = 10.0
REASON_SECONDS = 86400.0  # as long as it is remembered why nothing waits with a setting
FORGOTTEN_SECONDS = 86400.0  # after which nobody can need a file any more
KEY_LENGTH = 16
NO_VARIABLES: dict[str, str] = {}


class Pair(Message):
    """One pair, as `pair.json` in its directory describes it."""

    token: str
    since: float  # Unix time
    idle: float  # seconds
    setting: dict[str, str]
    python: str = ""  # of the agent,
    environment: dict[str, str] = NO_VARIABLES  # what it has beyond the login's,
    unset: tuple[str, ...] = ()  # and what of the login's it does not have
    modules: tuple[str, ...] = ()  # that it imports after torch
    room: int = 0  # characters for the command line of a job
    pid: int = 0
    started: int = 0  # with the PID, this identifies one process forever
    directory: str = ""

    @property
    def key(self) -> str:
        return os.path.basename(self.directory)


class EndOfPair(NamedTuple):
    """The processes of a pair that was ended, and those that do not go. PID -> name."""

    ended: dict[int, str]
    left: dict[int, str]


def library() -> str:
    return os.path.abspath(__file__).rsplit(os.sep, 4)[0]


def root() -> str:
    return os.path.join(home(), "warm")


def unfit_file(directory: str) -> str:
    return directory + ".unfit"


def left_file(directory: str) -> str:
    return directory + ".left"


def why_unfit(key: str) -> str:
    """Return why a setting cannot be made warm, if that was tried not long ago."""
    return read_reason(unfit_file(os.path.join(root(), key)))


def why_left(key: str) -> str:
    """Return why what waited with a setting left by itself, if nothing has waited since."""
    return read_reason(left_file(os.path.join(root(), key)))


def read_reason(path: str) -> str:
    try:
        if time.time() - os.stat(path).st_mtime > REASON_SECONDS:
            os.unlink(path)
            return ""
        with open(path, encoding="utf-8") as file:
            return file.read(200)
    except OSError:
        return ""


def note_reason(path: str, reason: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write(reason)


# -- which there are --------------------------------------------------------------------------


def all_pairs() -> list[Pair]:
    """Return the pairs of this machine, the oldest first; what dead ones left is removed."""
    try:
        names = os.listdir(root())
    except OSError:
        return []
    pairs = []
    for name in names:
        pair = read(os.path.join(root(), name)) if len(name) == KEY_LENGTH else None
        if pair is not None and pair.setting.get(setting.MACHINE) == setting.machine():
            if lives(pair):  # whatever time it is: the clock may have been set since
                pairs.append(pair)
            else:
                remove(pair)
        elif pair is None or time.time() > pair.since + pair.idle + FORGOTTEN_SECONDS:
            remove_if_old(os.path.join(root(), name))
    return sorted(pairs, key=lambda pair: pair.since)


def remove_if_old(path: str) -> None:
    """Remove what is left of before a boot, or of a start that was interrupted."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if time.time() - status.st_mtime > FORGOTTEN_SECONDS and status.st_uid == os.getuid():
            shutil.rmtree(path) if stat.S_ISDIR(status.st_mode) else os.unlink(path)


def read(directory: str) -> Pair | None:
    try:
        with open(os.path.join(directory, "pair.json"), "rb") as file:
            return decode(Pair, parse(file.read()), newer=True).replace(directory=directory)
    except (OSError, Nonsense):
        return None


def remove(pair: Pair) -> None:
    """Remove the directory of a pair that is gone, unless another has taken its place."""
    now = read(pair.directory)
    if now is not None and now.token == pair.token:
        shutil.rmtree(pair.directory, ignore_errors=True)


def lives(pair: Pair) -> bool:
    """Tell whether its first process is there, and still waits."""
    now = processes.find(pair.pid)
    there = now is not None and now.key == (pair.pid, pair.started) and not now.is_dead
    return there and waits(pair)


def waits(pair: Pair) -> bool:
    """Tell whether the process is no job's by now: its command line says so."""
    if processes.owner_of(pair.pid) != os.getuid():
        return False
    words = processes.contents(f"/proc/{pair.pid}/cmdline").split(b"\0")
    begins = words == [b""]  # while it is executed, and while it dies
    return begins or (b"standby" in words and os.fsencode(pair.key) in words)


def connect(pair: Pair) -> socket.socket:
    return connect_in(pair.directory, seconds=ANSWER_SECONDS)


def ask(pair: Pair, question: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask a pair, first of all how it is; nothing where it does not answer."""
    try:
        with connect(pair) as client:
            frames.send(client, question or {"do": "look"})
            return frames.receive(client)[0]
    except (OSError, EOFError, ValueError):
        return {}


# -- starting one -----------------------------------------------------------------------------


def start(run: RunDir, environ: Mapping[str, str], umask: int, least: float = 0.0) -> str:
    """Start a pair for jobs like this run's, and do not wait for it; return why not, or nothing.

    It waits for as long as the job said, and at least for so many seconds.
    """
    try:
        return start_for(run.read_spec(), run, environ, umask, least)
    except (OSError, ValueError) as error:
        return str(error)


def start_for(
    spec: Spec, run: RunDir, environ: Mapping[str, str], umask: int, least: float = 0.0
) -> str:
    reason = setting.unsuitable(spec, environ)
    if reason:
        return reason
    wanted = setting.setting_of(spec, environ, library(), umask)
    key = setting.key_of(wanted)
    reason = why_unfit(key)
    if reason:
        return reason
    others, idle = all_pairs(), max(spec.warm, least)
    for pair in others:
        if pair.key == key:  # it may have been made for longer, or for less
            ask(pair, {"do": "stay", "seconds": idle, "modules": modules_of(run)})
            return ""
    for pair in others[: max(0, len(others) - MOST + 1)]:
        end(pair)
    os.makedirs(root(), mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(left_file(os.path.join(root(), key)))
    variables = setting.import_environment(spec, environ)
    token = secrets.token_hex(8)
    variables[TOKEN_VARIABLE] = token
    unset = [name for name in environ if setting.matters(name) and name not in variables]
    room = sum(len(n) + len(v) for n, v in spec.env.items() if n not in variables) + ROOM_BYTES
    pair = Pair(
        token=token,
        since=time.time(),
        idle=idle,
        setting=wanted,
        python=spec.agent[0],
        environment={**variables, ROOM_VARIABLE: " " * min(room, 100_000)},
        unset=tuple(unset),
        modules=tuple(modules_of(run)),
        room=COMMAND_ROOM_BYTES + sum(map(len, spec.command)),
        directory=os.path.join(root(), key),
    )
    public = setting.public_environment(spec, environ)
    spawn(pair, environ, public)
    return ""


def modules_of(run: RunDir) -> list[str]:
    """Return the modules of installed packages that a rank of the last job had imported."""
    try:
        with open(os.path.join(run.path, "modules.json"), encoding="ascii") as file:
            names = json.load(file)
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)][:20000]


def spawn(pair: Pair, environ: Mapping[str, str], public: dict[str, str]) -> None:
    """Start the pair's first process in a directory that appears once it can be called.

    The job's variables go through a pipe: of those that nobody reads, none is kept.
    """
    new = f"{pair.directory}.{pair.token}"
    os.mkdir(new, 0o700)
    try:
        server = listen_in(new)
        with server:
            program = [sys.executable, *processes.OPTIONS, library(), "standby", pair.key]
            process = subprocess.Popen(
                [*program, pair.directory, str(server.fileno()), " " * COMMAND_ROOM_BYTES],
                env={**environ, ROOM_VARIABLE: " " * ROOM_BYTES},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[server.fileno()],
            )
        now = processes.find(process.pid)
        pair = pair.replace(pid=process.pid, started=now.started if now else 0)
        path = os.path.join(new, "pair.json")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(encode(pair), file)
        try:
            os.rename(new, pair.directory)
        except OSError:  # somebody else was faster
            process.kill()
            process.wait()
            raise
        assert process.stdin is not None
        with process.stdin:  # once it is closed, it may look at its directory
            process.stdin.write(json.dumps(public).encode("ascii"))
    finally:
        shutil.rmtree(new, ignore_errors=True)


# -- ending one -------------------------------------------------------------------------------


class PairProcesses(ProcessSet):
    """The processes of a pair that still waits: a job's is none."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def find(self) -> list[Process]:
        running = processes.everyone().values()
        return [one for one in running if not one.is_dead and is_of(self.pair, one.pid)]

    def names(self) -> dict[int, str]:
        """Look again; return PID -> name of what is there, and is no job's by now."""
        return {one.pid: one.name for one in self.living() if is_of(self.pair, one.pid)}


def end(pair: Pair) -> EndOfPair:
    """Ask a pair to leave, kill what does not, and wait until all of it is gone."""
    ours = PairProcesses(pair)
    names = ours.names()
    with contextlib.suppress(OSError), connect(pair) as client:
        frames.send(client, {"do": "leave"})
        with contextlib.suppress(EOFError, OSError, ValueError):
            frames.receive(client)  # it closes its end
    deadline = time.monotonic() + END_SECONDS
    while not ours.wait(ANSWER_SECONDS) and time.monotonic() < deadline:
        if job_processes.supervised(pair.pid)[0]:
            break  # a job was faster: it is none of ours any more
        names.update(ours.names())
        for process, _ in ours.seen.values():
            if is_of(pair, process.pid):
                processes.send(process, signal.SIGKILL)
    left = ours.names()
    ours.close()
    if not left:
        remove(pair)
    return EndOfPair({pid: name for pid, name in names.items() if pid not in left}, left)


def is_of(pair: Pair, pid: int) -> bool:
    """Tell whether a process is one of a pair that still waits."""
    if pid == pair.pid:
        return lives(pair)
    mark = os.fsencode(f"{TOKEN_VARIABLE}={pair.token}")
    return processes.owner_of(pid) == os.getuid() and mark in processes.environment(pid)
