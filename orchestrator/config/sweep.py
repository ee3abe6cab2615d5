"""Reads the file of a sweep: the options of `orchestrator sweep` as keys, and its command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from orchestrator.common.errors import UsageError

COMMAND = "command"


def words(path: Path) -> list[str]:
    """Return what would be typed after `orchestrator sweep`; every value is text, as it stands."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} has no keys", "write grid: {lr: [1e-4, 3e-4]}, command: train.py")
    command = data.pop(COMMAND, [])
    program = shlex.split(command) if isinstance(command, str) else texts(path, COMMAND, command)
    options = [word for key, value in data.items() for word in typed(path, str(key), value)]
    return [*options, *(["--", *program] if program else [])]


def typed(path: Path, key: str, value: Any) -> list[str]:
    """Return the words of one option."""
    flag = f"--{key.replace('_', '-')}"
    if key == "grid" and isinstance(value, dict):
        pairs = ((name, inner) for name, inner in value.items())
        return [word for name, inner in pairs for word in (flag, f"{name}={values(path, inner)}")]
    if isinstance(value, list):
        return [f"{flag}={one}" for one in texts(path, key, value)]
    if not isinstance(value, str):
        raise UsageError(f"{path}: {key} takes a value, or a list")
    if value in ("true", "false"):
        return [flag] if value == "true" else []
    return [f"{flag}={value}"]


def values(path: Path, inner: Any) -> str:
    return inner if isinstance(inner, str) else json.dumps(texts(path, "grid", inner))


def texts(path: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{path}: {key} takes texts and numbers, or a list of them")
    return value
