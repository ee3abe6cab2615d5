"""The command lines of the system's ssh, and of a node's login shell."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.head.nodes.node_list import NumberedNode
from orchestrator.head.nodes.server_command import FIRST, TAKEN


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
    words += ["-o", "RemoteCommand=none"]  # of an ssh_config; ssh refuses to have two
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

GRACE_SECONDS = 5  # between SIGTERM and SIGKILL, on the node
LONGEST_BYTES = 120_000  # Linux takes 128 KiB for one word of a command line
OWN_FAILURE = 125  # as timeout(1) and env(1) have it: the command was not started

BEGINS = b"\norchestrator: here the command begins\n"  # on both streams, after what rc files print
GO = "go"  # what answers it, unless the head has given the login shell up by then

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
    sleep {GRACE_SECONDS}
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
    """Where to run; the home directory where there is none of that name."""

    path: str
    needed: bool = False  # else the home directory will do,
    named: bool = False  # and that is said, as somebody has written this one down


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


@functools.lru_cache(maxsize=16)  # most nodes have the same
def for_login_shell(text: str) -> str:
    """Return a line that has /bin/sh run a text, whichever shell gets it first."""
    line = f"exec /bin/sh -c '{DECODE}' sh '{encoded(os.fsencode(text))}'"
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


def encoded(data: bytes) -> str:
    """Write bytes for printf %b, without what csh, fish or a quote would change."""
    return data.decode("latin-1").translate(ESCAPES)
