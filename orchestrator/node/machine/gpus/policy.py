"""Reads the rules for those who share a machine's GPUs: /etc/orchestrator/policy.yaml.

A few lines of `name: value`, which is YAML; nodes have no reader of more. What cannot be believed
or understood does not count, and `problem` says why: the rules are advice, and lock nobody out.
"""

from __future__ import annotations

import os
import re

from orchestrator.common import files
from orchestrator.common.permissions import user_name
from orchestrator.protocol.facts import Policy

PLACE = "/etc/orchestrator/policy.yaml"
VARIABLE = "ORCHESTRATOR_POLICY"  # names another file, where nobody is root
LARGEST_BYTES = 1 << 16
LINE = re.compile(r"(\w+)\s*:\s*(['\"]?)(.*?)\2")
COUNTS, TIMES = ("gpus_per_user",), ("time_limit", "idle_limit")


def read() -> Policy:
    named = os.environ.get(VARIABLE)
    path = os.path.realpath(named or PLACE)
    try:
        with files.open_plain(path) as file:
            problem = doubt(os.fstat(file.fileno()), os.stat(os.path.dirname(path)), bool(named))
            text = file.read(LARGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and not named
        return Policy() if missing else Policy(file=path, problem=error.strerror or str(error))
    return Policy(file=path, problem=f"it {problem}") if problem else understood(path, text)


def doubt(file: os.stat_result, directory: os.stat_result, named: bool) -> str:
    """Say why a file is not believed; one that a login names may be that of its directory's owner.

    Nobody else may write either of them.
    """
    owners = {0, os.getuid(), directory.st_uid} if named else {0, os.getuid()}
    if file.st_uid not in owners:
        return f"belongs to {user_name(file.st_uid)}"
    return "may be written by others" if (file.st_mode | directory.st_mode) & 0o022 else ""


def understood(path: str, text: str) -> Policy:
    """Return the rules of a file; of the first line that is none, what is wrong with it."""
    rules: dict[str, float] = {}
    problem = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"(^|\s)#.*", "", line).strip()
        if not words or words == "---":
            continue
        try:
            name, value = rule(words)
            rules[name] = value
        except ValueError as error:
            problem = problem or f"line {number}: {error}"
    return Policy(
        file=path,
        gpus_per_user=int(rules.get("gpus_per_user", 0)),
        time_limit=rules.get("time_limit", 0.0),
        idle_limit=rules.get("idle_limit", 0.0),
        problem=problem,
    )


def rule(words: str) -> tuple[str, float]:
    from orchestrator.common.errors import UsageError  # most machines have no rules
    from orchestrator.common.text import parse_seconds

    match = LINE.fullmatch(words)
    name, value = (match[1], match[3]) if match else ("", "")
    if name in COUNTS and re.fullmatch("[1-9][0-9]{0,4}", value):
        return name, int(value)
    if name in TIMES:
        try:
            seconds = parse_seconds(name, value)
        except UsageError as error:
            raise ValueError(error.what) from error
        if seconds > 0:
            return name, seconds
    if name in (*COUNTS, *TIMES):
        raise ValueError(f"{name} cannot be {value or 'nothing'}")
    raise ValueError(f"no rule: {words[:60]}; there are {', '.join((*COUNTS, *TIMES))}")
