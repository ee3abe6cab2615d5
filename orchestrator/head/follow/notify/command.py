"""Checks the commands of --notify, and keeps them for the heads that come later.

A command may hold a secret, such as the address of a channel. Records show its program alone. The
file with the whole command is for its owner, and is used only if no other login can write it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.hiding import REDACTED
from orchestrator.records.experiment import NOTIFY, Experiment

LARGEST_BYTES = 1 << 20
FORMER = re.compile(r"(cmd|mail|webhook):|https?://", re.IGNORECASE)
PROGRAM = re.compile(r"[A-Za-z0-9_./~+-]+")


def checked(commands: Sequence[str]) -> tuple[str, ...]:
    """Return the commands, each once."""
    if any(not command.strip() or "\0" in command for command in commands):
        raise UsageError("--notify: there is no command", "write a shell command")
    if any(FORMER.match(command.strip()) for command in commands):
        raise UsageError(
            "--notify takes a shell command, and no longer cmd:, mail:, webhook: or a URL",
            "cmd:X is X; docs/reference/jobs.md has one line with curl and one with mail",
        )
    return tuple(dict.fromkeys(map(str.strip, commands)))


def shown(command: str) -> str:
    """Return the command without its arguments, which may be secret."""
    program, _, arguments = command.partition(" ")
    if not PROGRAM.fullmatch(program):
        return REDACTED
    return f"{program} {REDACTED}" if arguments else program


def secrets(commands: Sequence[str]) -> list[str]:
    """Return the commands that no record may show."""
    return [command for command in commands if shown(command) != command]


def keep(experiment: Experiment, commands: Sequence[str]) -> None:
    """Write the commands down, readable by this login alone."""
    if commands:
        experiment.write(NOTIFY, json.dumps(commands))


def kept(experiment: Experiment) -> tuple[str, ...]:
    """Return the commands of a job; raise UsageError if another login may have written them."""
    path = experiment.path / NOTIFY
    try:
        with files.open_plain(path) as file:
            status, text = os.fstat(file.fileno()), file.read(LARGEST_BYTES)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"{path} can be written by another login, and is not used")
    try:
        return checked(json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged", f"rm {path}; no command is run then") from error
