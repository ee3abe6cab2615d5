"""Tell what kind of program a name is in a directory, on the head and on the nodes.

Shipped to the nodes: the standard library alone, and Python 3.9.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys

# The name of this package for pip and uv.
DISTRIBUTION = "master-launch"


def program_at(name: str, workdir: str) -> tuple[str, str]:
    """Return ("script" or "program", its name), or (reason, path) if it cannot be started."""
    path = os.path.join(workdir, name)
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, "__main__.py")):
        return "script", name
    if os.path.isdir(path):
        return "a directory", path
    if not os.path.isfile(path):
        # As the ranks look for it: in the environment of their Python first.
        places = path_with(sys.executable, os.environ.get("PATH", os.defpath))
        command = None if "/" in name else shutil.which(name, path=places)
        if command is None:
            return "missing", path
        return ("script", command) if of_this_python(command) else ("program", name)
    if not os.access(path, os.R_OK):
        return "unreadable", path
    with open(path, "rb") as file:
        first = file.readline(256)
    foreign = first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first)
    if name.endswith(".py") or not foreign:
        return "script", name
    if not os.access(path, os.X_OK):
        return "not executable", path
    return "program", name if "/" in name else "./" + name


def of_this_python(command: str) -> bool:
    """Return True if a command is a script for this very Python, as pip installs them.

    Where the path of the Python is long or has a space, pip writes a shell that executes it.
    """
    with open(command, "rb") as file:
        first, second = file.readline(1024), file.readline(4096)
    python = os.fsencode(os.path.join(os.path.dirname(os.path.abspath(sys.executable)), ""))
    words = second.split(b'"') if first.strip() == b"#!/bin/sh" else [first[2:].strip()]
    return any(word.startswith(python + b"python") for word in words)


def path_with(python: str, path: str) -> str:
    """Return a PATH on which `python`, and the commands installed with it, are those of the job."""
    directory = os.path.dirname(python)
    for name in ("python", "python3"):
        command = os.path.join(directory, name)
        if os.path.exists(command) and shutil.which(name, path=path) != command:
            return os.pathsep.join([directory, path])
    return path


def installed_command(name: str, *module: str) -> list[str]:
    """Return the words that start a command of this installation: its path, or -m and a module.

    `python -m` would find a json.py of the directory in which it is started first.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), name)
    return [path] if os.access(path, os.X_OK) else [sys.executable, "-m", "orchestrator", *module]


def typed_command(name: str, *options: str) -> list[str]:
    """Return how the user types a command of this package: by its name, its path, or through uvx.

    `options` are those of uvx, which makes an environment for one command.
    """
    if "archive-v0" in sys.prefix.split(os.sep):
        source = installed_from()
        own = source == name == DISTRIBUTION
        return ["uvx", *options, *([] if own else ["--from", source]), name]
    return [name] if shutil.which(name) else installed_command(name)


def installed_from() -> str:
    """Return the wheel or the directory that this package was installed from, else its name."""
    import json
    from importlib import metadata
    from urllib.parse import unquote

    place = metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
    return unquote(json.loads(place).get("url", "").partition("file://")[2]) or DISTRIBUTION


def how_to_add(*packages: str) -> str:
    """Return the command that adds packages to this Python, as this package came into it."""
    added = [word for package in packages for word in ("--with", package)]
    words = [*typed_command(os.path.basename(sys.argv[0]), *added), *sys.argv[1:]]
    if words[0] != "uvx":
        pip = [sys.executable, "-m", "pip", "install"]
        if importlib.util.find_spec("pip") is None:
            pip = ["uv", "pip", "install", "--python", sys.executable]
        words = [*pip, *packages]
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        words = ["uv", "tool", "install", *added, installed_from()]
    elif os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        words = ["pipx", "inject", DISTRIBUTION, *packages]
    return shlex.join(words)


# Up to this many `..` in a program's path stay within its own snapshot.
MOST_ABOVE = 3


def tree_title(directory: str) -> str:
    """Return the path of a tree inside its snapshots, from the directory that it was in."""
    return "/".join([part for part in directory.split("/") if part][-MOST_ABOVE:]) or "root"
