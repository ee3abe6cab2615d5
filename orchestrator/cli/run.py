"""Run a command; every error becomes a sentence and an exit code here."""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

import click

from orchestrator import interrupt
from orchestrator.errors import EXIT_CHECK, EXIT_USAGE, OrchestratorError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no defect of ours, wherever it is met
GONE = (errno.EPIPE, errno.EIO)  # as in screen/output.py


def complain(text: str) -> None:
    from orchestrator.head.screen import output

    output.complain(text)


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command; print every error as a sentence and exit with its code."""
    try:
        code = command.main(prog_name=name, standalone_mode=False)
    except OrchestratorError as error:
        complain(f"error: {error}")
        code = error.exit_code
    except click.exceptions.Exit as leaving:
        code = leaving.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        complain(f"error: {where}{error.strerror}")
        code = EXIT_USAGE
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        complain(
            "error: no further thread can be started on this machine\n"
            "  allow more processes (ulimit -u), or end some of those that run"
        )
        code = EXIT_CHECK
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    interrupt.leave(code if isinstance(code, int) else 0)
