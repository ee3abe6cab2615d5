"""The command line of the system's ssh for a shell on one node, with a job's environment."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.head.chores.numbered_node import NumberedNode
from orchestrator.head.chores.shell_line import OWN_FAILURE, Directory, change_to, for_login_shell
from orchestrator.head.connect.server_command import python_candidates

FIND_PYTHON = """\
program={program}
for python in {pythons}; do
    case $python in "~/"*) python=$HOME/${{python#??}};; esac
    command -v "$python" >/dev/null 2>&1 && exec "$python" -c "$program" {arguments}
done
echo "orchestrator: no Python here; name one with python=/path in the node list" >&2
exit {failure}
"""


@dataclass(frozen=True)
class JobPart:
    """A job, and the number that a node has in it."""

    job: str
    node: int
    wrap: str | None = None  # the command that it is entered by, as the node's shell reads it


@dataclass(frozen=True)
class Login:
    """How the system's ssh reaches a node."""

    config: Path | None
    timeout: float
    strict: bool


def ssh_command(login: Login, target: NumberedNode, line: str, *, terminal: bool) -> list[str]:
    """Return the command line; like ours, it goes by the node list and the ssh_config."""
    node = target.node
    words = ["ssh"]
    words += ["-F", str(login.config)] if login.config else []
    words += ["-l", node.user] if node.user else []
    words += ["-p", str(node.port)] if node.port else []
    words += ["-o", "StrictHostKeyChecking=yes"] if login.strict else []
    words += ["-o", "RemoteCommand=none"]  # of an ssh_config; ssh refuses to have two
    words += ["-o", f"ConnectTimeout={max(1, round(login.timeout))}"]
    return [*words, "-t" if terminal else "-T", "--", node.host, line]


def plain_line(directory: Directory, words: Sequence[str]) -> str:
    """Return what the login shell gets for a shell, or a program, without any job."""
    text = change_to(directory)
    if not words:
        return for_login_shell(text + 'exec "${SHELL:-/bin/sh}" -l\n')
    if len(words) == 1:
        return for_login_shell(f'{text}exec "${{SHELL:-/bin/sh}}" -c {shlex.quote(words[0])}\n')
    return for_login_shell(f"{text}exec {shlex.join(words)}\n")


def job_line(part: JobPart, python: str | None, directory: str, words: Sequence[str]) -> str:
    """Return what the login shell gets for the same with a job's environment."""
    from orchestrator.head.connect.channel import HOUSE  # exec does without the protocol

    program = (HOUSE / "node/shell.py").read_text(encoding="utf-8")
    text = FIND_PYTHON.format(
        program=shlex.quote(program),
        pythons=shlex.join(python_candidates(python)),
        arguments=shlex.join([part.job, str(part.node), directory, *words]),
        failure=OWN_FAILURE,
    )
    if part.wrap:
        text = f"exec {part.wrap} /bin/sh -c {shlex.quote(text)}\n"
    return for_login_shell(text)
