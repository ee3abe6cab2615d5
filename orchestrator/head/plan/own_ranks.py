"""Notices a program that starts ranks by itself, as each rank of a job would do again."""

from __future__ import annotations

import re
from pathlib import Path

MOST_READ = 1 << 20  # bytes
IN_SHELL = re.compile(
    r"^(?!\s*#)(?:.*(?:[;&|]|\s-m|\b(?:exec|then|do|else|nohup|time|env|\w+=\S+))\s+|\s*)"
    r"(torchrun|torch\.distributed\.(?:run|launch)|accelerate\s+launch|deepspeed)\s",
    re.MULTILINE,
)
IN_PYTHON = re.compile(r"^(?!\s*#).*\b((?:mp|multiprocessing)\.spawn)\(", re.MULTILINE)


def warning(file: Path, kind: str, ranks_per_node: int) -> str:
    """Say what would start ranks in a "script" (Python) or "program", and what to type instead."""
    try:
        with file.open("rb") as program:
            text = program.read(MOST_READ).decode(errors="replace")
    except OSError:  # it is on the nodes alone
        return ""
    if kind == "program" and text.startswith("#!") and (call := IN_SHELL.search(text)):
        return (
            f"WARNING: {file} calls {call[1]}, which starts ranks by itself, in every rank of this"
            " job: launch the program that it starts, with --env NAME=VALUE for what it sets"
        )
    if kind == "script" and ranks_per_node > 1 and (call := IN_PYTHON.search(text)):
        return (
            f"WARNING: {file} calls {call[1]}, which starts ranks by itself, in each of the"
            f" {ranks_per_node} ranks of a node; if they are to be all ranks: --nproc 1"
        )
    return ""
