"""Runs a command on many nodes at once; it ends there even if this process is killed."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.common.errors import OrchestratorError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.transport import Channel, Connection, Transport, notice_loss
from orchestrator.head.nodes import server_command
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.nodes.server_command import FIRST, TAKEN
from orchestrator.protocol.timing import EXEC_END_SECONDS, EXEC_GRACE_SECONDS, EXEC_SILENCE_SECONDS


def ssh_command(
    target: NumberedNode,
    line: str,
    *,
    config: Path | None,
    timeout: float,
    strict: bool,
    terminal: bool,
) -> list[str]:
    """Return the command line; like ours, it goes by the node list and the ssh_config."""
    node = target.node
    words = ["ssh"]
    words += ["-F", str(config)] if config else []
    words += ["-l", node.user] if node.user else []
    words += ["-p", str(node.port)] if node.port else []
    words += ["-o", "StrictHostKeyChecking=yes"] if strict else []
    # ssh refuses a second command if the ssh_config has one.
    words += ["-o", "RemoteCommand=none"]
    words += ["-o", f"ConnectTimeout={max(1, round(timeout))}"]
    return [*words, "-t" if terminal else "-T", "--", node.host, line]


def plain_line(directory: Directory, words: Sequence[str]) -> str:
    """Return what the login shell gets for a shell, or a program, without any job."""
    text = change_to(directory)
    if not words:
        return for_login_shell(text + 'exec "${SHELL:-/bin/sh}" -l\n')
    if len(words) == 1:
        return for_login_shell(f'{text}exec "${{SHELL:-/bin/sh}}" -c {shlex.quote(words[0])}\n')
    return for_login_shell(f"{text}exec {shlex.join(words)}\n")


# -- shell line ---------------------------------------------------------------------------------
# Write the line that a node's login shell gets: a command, with a supervisor of a few lines of
# sh.

# Linux limits one word of a command line to 128 KiB.
LONGEST_BYTES = 120_000
# timeout(1) and env(1) exit with this code if they could not start the command.
OWN_FAILURE = 125

# Printed on both streams by the login shell, after the output of its rc files.
BEGINS = b"\norchestrator: here the command begins\n"
# The head answers BEGINS with this, unless it has given the login shell up.
GO = "go"

SPECIAL = b"'!\\"
ESCAPES = {
    byte: f"\\0{byte:03o}" for byte in range(256) if not 0x20 <= byte < 0x7F or byte in SPECIAL
}
ESCAPED = BEGINS.decode().replace("\n", "\\n")
DECODE = 'eval "$(printf %b "$1")"'
# sshd starts each command in a session of its own. Another server may not: its group is not ours.
# What was asked of a login shell that was given up must not run later.
BEGIN = f"""\
read -r x x x x group x </proc/$$/stat
[ "$group" = $$ ] || exec setsid /bin/sh -c '{DECODE}' sh "$1"
read -r x && [ "$x" = {FIRST} ] || {{ echo {TAKEN} >&2; exit {OWN_FAILURE}; }}
printf '{ESCAPED}'
printf '{ESCAPED}' >&2
read -r x && [ "$x" = {GO} ] || exit {OWN_FAILURE}
exec 3<&0 </dev/null
"""
RUN = f"""\
trap 'over=1' TERM
(
    trap '' TERM INT HUP PIPE
    read -r x <&3
    kill -TERM 0
    sleep {EXEC_GRACE_SECONDS}
    kill -KILL 0
) >/dev/null 2>&1 &
watcher=$!
exec 4>&2 2>/dev/null
( "$@" ) 2>&4 3<&- 4>&-
code=$?
[ -z "$over" ] || kill -KILL 0
kill -KILL $watcher
exit $code
"""


@dataclass(frozen=True)
class Directory:
    """The directory to run in; the home directory replaces a missing one, unless `needed`."""

    path: str
    # If False, a missing directory is replaced by the home directory.
    needed: bool = False
    # If True, that replacement is reported, as the user chose the directory.
    named: bool = False


def shell_line(words: Sequence[str], directory: Directory) -> str:
    """Return what any login shell (sh, bash, zsh, csh, fish) passes on unchanged.

    One word is shell text for the login shell, as with ssh; several are a program and its
    arguments. Nothing in the single quotes is special to any of these shells.
    """
    text = BEGIN + change_to(directory)
    if len(words) == 1:
        text += f'set -- "${{SHELL:-/bin/sh}}" -c {shlex.quote(words[0])}\n'
    else:
        text += f"set -- {shlex.join(words)}\n"
    return for_login_shell(text + RUN)


# Most nodes get the same text.
@functools.lru_cache(maxsize=16)
def for_login_shell(text: str) -> str:
    """Return a line that has /bin/sh run a text, whichever shell gets it first."""
    line = f"exec /bin/sh -c '{DECODE}' sh '{encode_bytes(os.fsencode(text))}'"
    if len(line) > LONGEST_BYTES:
        raise UsageError(
            f"the command is too long: {len(line)} bytes, and {LONGEST_BYTES} are possible",
            "send it as a file: orchestrator push FILE /tmp/; orchestrator exec -- sh /tmp/FILE",
        )
    return line


def change_to(directory: Directory) -> str:
    path = directory.path
    where = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
    if path == "~":
        where = '"$HOME"'
    if directory.needed:
        return f"cd -- {where} || exit {OWN_FAILURE}\n"
    otherwise = ":"
    if directory.named:
        said = shlex.quote(f"orchestrator: there is no directory {path} here; running in")
        otherwise = f'echo {said} "$PWD" >&2'
    return f"cd -- {where} 2>/dev/null || {otherwise}\n"


def encode_bytes(data: bytes) -> str:
    """Return bytes escaped for printf %b, safe in single quotes of csh and fish as well."""
    return data.decode("latin-1").translate(ESCAPES)


# -- on many nodes at once -------------------------------------------------------------------------

PIECE_BYTES = 1 << 16
# The end of an rc file's output is kept for error messages; BEGINS must fit in it.
NOISE_BYTES = 1 << 12
# timeout(1) exits with this code.
TIMED_OUT = 124
NEVER_BEGAN = "its login shell waits"


class Sink(Protocol):
    """Takes what the program on one node writes to one of its streams."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ExecOutcome:
    """How the command ended on one node."""

    node: NumberedNode
    # None where the command has no exit code; `problem` says why.
    code: int | None = None
    seconds: float = 0.0
    problem: str = ""
    fix: str = ""
    # The node could not be reached, or its connection broke.
    lost: bool = False


class Prologue:
    """Withholds the output of rc files on one stream, until the command begins."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.begun = False
        self.said = b""

    def take(self, data: bytes) -> None:
        if not self.begun:
            noise, mark, data = (self.said + data).partition(BEGINS)
            self.begun = bool(mark)
            self.said = noise[-NOISE_BYTES:]
        if self.begun and data:
            self.sink.write(data)


class ExecSession:
    """One node's session: a connection, and the program at its other end."""

    def __init__(self, node: NumberedNode) -> None:
        self.node = node
        self.connection: Connection | None = None
        self.channel: Channel | None = None
        self.began = 0.0
        # Set once the login shell has printed BEGINS.
        self.begun = False
        # The reason why the program was ended, or "".
        self.why = ""
        self.given_up = False
        # Another thread may call end() during start() or begin().
        self.changing = threading.RLock()
        self.timer = threading.Timer(0.0, self.give_up)

    def after(self, seconds: float | None, do: Callable[[], None]) -> None:
        """Set the session's only timer; None cancels it."""
        self.timer.cancel()
        if seconds is not None:
            self.timer = threading.Timer(seconds, do)
            self.timer.daemon = True
            self.timer.start()

    def start(self, connection: Connection, line: str, wait: float) -> bool:
        """Start the login shell on the node; return False if end() was called before."""
        with self.changing:
            if self.why:
                connection.close()
                return False
            self.connection = connection
            self.channel = connection.run(line, wait)
            self.channel.settimeout(None)
            self.began = time.monotonic()
            self.after(wait, self.give_up)
        # The shell may have ended already; the reader reports the reason.
        with contextlib.suppress(OSError):
            self.channel.sendall(server_command.FIRST_LINE)
        return True

    def begin(self, limit: float | None) -> None:
        """Start the program and its time limit, unless end() was called before."""
        with self.changing:
            if self.why or self.channel is None:
                return
            self.begun = True
            self.after(limit, lambda: self.end("timeout"))
            with contextlib.suppress(OSError):
                self.channel.sendall(f"{GO}\n".encode())

    def end(self, reason: str) -> None:
        """End the program: the supervisor on the node reacts to the end of its input."""
        with self.changing:
            if not self.why:
                self.why = reason
                if self.channel is not None:
                    self.after(EXEC_END_SECONDS, self.give_up)
                    self.channel.shutdown_write()

    def give_up(self) -> None:
        """Close the connection of a program that did not begin in time, or does not end."""
        with self.changing:
            if not self.begun and not self.why:
                self.why = NEVER_BEGAN
            self.given_up = True
            if self.connection is not None:
                self.connection.close()


class Execution:
    """The same command on all these nodes."""

    def __init__(
        self,
        ssh: Transport,
        nodes: Sequence[NumberedNode],
        line_of: Callable[[NumberedNode], str],
        # The flag is True for standard error.
        sink_of: Callable[[NumberedNode, bool], Sink],
        *,
        limit: float | None = None,
    ) -> None:
        self.ssh, self.line_of, self.sink_of = ssh, line_of, sink_of
        self.limit = limit
        self.sessions = [ExecSession(node) for node in nodes]

    def end(self, reason: str) -> None:
        """End it everywhere; may be called from a signal handler."""
        for session in self.sessions:
            session.end(reason)

    def go(self) -> list[ExecOutcome]:
        """Run the command on all nodes, and return the outcomes in their order."""
        # An invalid command raises here, before any node is contacted.
        lines = [self.line_of(session.node) for session in self.sessions]
        fleet.need_room_for_nodes(self.sessions)
        pairs = list(zip(self.sessions, lines, strict=True))
        results = fleet.map_parallel(pairs, lambda pair: self._run_session(*pair))
        return [
            ExecOutcome(session.node, problem=result.what, fix=result.fix, lost=True)
            if isinstance(result, OrchestratorError)
            else result
            for session, result in zip(self.sessions, results, strict=True)
        ]

    def _run_session(self, session: ExecSession, line: str) -> ExecOutcome:
        connection = self.ssh.connect(session.node.node)
        notice_loss(connection, EXEC_SILENCE_SECONDS)
        if not session.start(connection, line, self.ssh.timeout):
            return ExecOutcome(session.node, problem=f"not started ({session.why})")
        assert session.channel is not None
        channel = session.channel
        out, err = (Prologue(self.sink_of(session.node, errors)) for errors in (False, True))
        complaints = fleet.start_thread(lambda: receive_data(channel.recv_stderr, err))
        try:
            if receive_data(channel.recv, out, until_it_begins=True):
                session.begin(self.limit)
            receive_data(channel.recv, out)
            complaints.join()
            code = channel.recv_exit_status()
            lost = not connection.alive
        finally:
            session.timer.cancel()
            out.sink.close()
            err.sink.close()
            connection.close()
        return outcome_of(session, code, lost=lost, said=out.said + b"\n" + err.said)


def outcome_of(session: ExecSession, code: int, *, lost: bool, said: bytes) -> ExecOutcome:
    seconds = time.monotonic() - session.began
    if session.why == NEVER_BEGAN:
        what, fix = server_command.why_never_begins(said.decode(errors="replace"))
        return ExecOutcome(session.node, None, seconds, what, fix, lost=True)
    if not session.begun and not session.why and code >= 0:
        problem, fix = why_not_begun(code, said)
        return ExecOutcome(session.node, None, seconds, problem, fix, lost=True)
    ended = ExecOutcome(session.node, code if code >= 0 else None, seconds)
    if session.given_up:
        hint = f"look there: orchestrator ssh {session.node.index}"
        return ExecOutcome(
            session.node, None, seconds, "it does not end, and may still run", hint, True
        )
    if session.why == "timeout":
        return ExecOutcome(session.node, TIMED_OUT, seconds, "ended after its time-out")
    if session.why and code < 0:
        return ExecOutcome(session.node, None, seconds, f"ended ({session.why})")
    if code < 0 and lost:
        return ExecOutcome(session.node, None, seconds, "the connection broke", lost=True)
    if code < 0:
        return ExecOutcome(session.node, None, seconds, "its shell was killed")
    return ended


def why_not_begun(code: int, said: bytes) -> tuple[str, str]:
    """Return why a login shell ended before the command, and a fix."""
    if server_command.TAKEN.encode() in said:
        return server_command.INPUT_TAKEN
    text = said.decode(errors="replace")
    if another := server_command.another_user(text):
        return another
    last = server_command.last_line(text)
    problem = f"its login shell ends before the command, with exit code {code}"
    return problem + (f": {last}" if last else ""), server_command.LOOK_FOR_EXIT


def receive_data(
    read: Callable[[int], bytes], stream: Prologue, *, until_it_begins: bool = False
) -> bool:
    """Pass data to the stream, no faster than it accepts them; return False at the end."""
    while not (until_it_begins and stream.begun):
        try:
            data = read(PIECE_BYTES)
        except OSError:
            return False
        if not data:
            return False
        stream.take(data)
    return True
