"""Says why our program does not start on a node, by what the login shell printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestrator.head.nodes import server_command
from orchestrator.head.nodes.environment import Environment

TOO_OLD = "its Python {} is too old: 3.9 is needed"
ANOTHER_PYTHON = "name one with python=/path after the node in the list, or --python /path"


def no_server_reason(noise: bytes, errors: str, environment: Environment) -> tuple[str, str]:
    output = server_command.last_line(errors or noise.decode(errors="replace"))
    if b"no-python-here" in noise:
        return no_python(server_command.pythons(environment))
    another = server_command.another_user(noise.decode(errors="replace"))
    if another:
        return another
    old = re.search(rb"old-python ([0-9.]{1,20})", noise)
    if old:
        return TOO_OLD.format(old[1].decode()), ANOTHER_PYTHON
    # A line of its own: a shell that does not understand our command may print that.
    lines = (noise.decode(errors="replace") + "\n" + errors).splitlines()
    taken = server_command.TAKEN in map(str.strip, lines)
    if taken and not environment.wrap:
        return server_command.INPUT_TAKEN
    python = re.search(rb"^python-here (.{1,500})$", noise, re.MULTILINE)
    if python and not taken:
        return no_sound_python(python[1].decode(errors="replace"), errors or output)
    if output.startswith("srun: "):
        return f"Slurm starts no step there: {output}", "look at: squeue, scontrol show node"
    said = f": {output}" if output and not taken else ""
    if environment.wrap:
        return (
            f"`{environment.wrap}` ends before our program starts{said}",
            f"try there: {environment.wrap} /bin/sh -c 'cat' </etc/hostname  (docker exec needs -i"
            " and no -t)",
        )
    return (
        f"its login shell ends before our program starts{said}",
        server_command.LOOK_FOR_EXIT,
    )


def no_sound_python(path: str, output: str) -> tuple[str, str]:
    if "Unknown option: -X" in output:  # Python 2
        return TOO_OLD.format(path), ANOTHER_PYTHON
    lines = [line for line in output.splitlines() if not line.startswith("python-here ")]
    # What Python says when it cannot begin has the place after the error.
    last = server_command.last_line("\n".join([line for line in lines if "Error" in line] or lines))
    said = f": {last}" if last else ""
    return f"its Python, {path}, ends before our program starts{said}", (
        f"try there: {path} -c 'import json, selectors'; if that works, look for PYTHONHOME and"
        " PYTHONPATH in its rc files; if not, name another with python= after the node in the list,"
        " or --python"
    )


def no_python(pythons: Sequence[str]) -> tuple[str, str]:
    if len(pythons) == 1:
        return (
            f"there is no {pythons[0]} that can be executed",
            "correct --python, or the node's python= in the list",
        )
    return (
        f"there is no Python: neither {', '.join(pythons[:-1])} nor {pythons[-1]}",
        ANOTHER_PYTHON,
    )
