"""Reads what the members of a sweep differ in: variables with values or ranges, commands. Pure.

lr=1e-4,3e-4   seed=0..3   names=["a,b","c"]   drop=uniform(0,0.5)   lr=log(1e-5,1e-2)
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.common.errors import UsageError
from orchestrator.head.plan import redact

VARIABLE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
WHOLE = re.compile(r"(-?\d{1,15})\.\.(-?\d{1,15})")
BETWEEN = re.compile(r"(uniform|log)\(([^,]+),([^,]+)\)")
MOST_MEMBERS = 100_000


@dataclass(frozen=True)
class Variable:
    """A name with its values in order, or with the ends of a range."""

    name: str
    values: Sequence[str] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False


@dataclass(frozen=True)
class Member:
    """One program run of a sweep."""

    number: int
    values: Mapping[str, str] = field(default_factory=dict)
    # Set where each member has a command of its own.
    program: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return one line with the member's values or command, without secrets."""
        values = [f"{name}={value}" for name, value in self.values.items()]
        return " ".join(values) or shlex.join(redact.redacted_command(self.program))


# -- variables --------------------------------------------------------------------------------


def parse_variables(texts: Sequence[str]) -> list[Variable]:
    """Read NAME=VALUES texts; a name that comes twice is an error."""
    found = [variable_of(text) for text in texts]
    names = [variable.name for variable in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{twice[0]} is given twice", "write its values into one list")
    return found


def variable_of(text: str) -> Variable:
    match = VARIABLE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not NAME=VALUES", "write lr=1e-4,3e-4")
    name, values = match.groups()
    if between := BETWEEN.fullmatch(values):
        return range_of(name, *between.groups())
    if whole := WHOLE.fullmatch(values):
        first, last = map(int, whole.groups())
        if not first <= last < first + MOST_MEMBERS:
            raise UsageError(f"{text}: the range is empty, or longer than {MOST_MEMBERS:,}")
        return Variable(name, tuple(map(str, range(first, last + 1))))
    listed = values.split(",") if values else []
    if values.startswith("["):
        try:
            found = json.loads(values)
        except ValueError as error:
            raise UsageError(f"{text}: not a JSON list: {error}") from None
        listed = [one if isinstance(one, str) else json.dumps(one) for one in found]
    if not listed:
        raise UsageError(f"{name} has no values", f"write {name}=1,2,3, or {name}=0..9")
    if len(set(listed)) < len(listed):
        raise UsageError(f"{text}: a value is given twice", "name each once")
    return Variable(name, tuple(listed))


def range_of(name: str, kind: str, low: str, high: str) -> Variable:
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = math.nan, math.nan
    least = 0.0 if kind == "log" else -math.inf
    if not least < ends[0] < ends[1] < math.inf:
        raise UsageError(
            f"{name}={kind}({low},{high}) is not a range",
            f"write two numbers, the lower one first: {name}={kind}(1e-5,1e-2)",
        )
    return Variable(name, (), *ends, kind == "log")


# -- members ----------------------------------------------------------------------------------


def grid_members(some: Sequence[Variable]) -> list[Member]:
    """Return a member for each combination of values; the last variable changes first."""
    for variable in some:
        if not variable.values:
            raise UsageError(
                f"{variable.name} is a range without steps, which no grid has",
                "name its values, or let Optuna draw from it: --optuna N",
            )
    count = math.prod(len(variable.values) for variable in some)
    if count > MOST_MEMBERS:
        raise UsageError(f"the sweep would have {count:,} members", f"it takes {MOST_MEMBERS:,}")
    names = [variable.name for variable in some]
    every = itertools.product(*(variable.values for variable in some))
    return [Member(at, dict(zip(names, values, strict=True))) for at, values in enumerate(every)]


def members_of_lines(text: str) -> list[Member]:
    """Return a member for each command line; empty lines and comments are none."""
    members: list[Member] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"line {number}: {line!r}: {error}") from None
        if words:
            members.append(Member(len(members), program=tuple(words)))
    if not members:
        raise UsageError("there is no command line", "write one for each member: train.py --lr 1")
    return members


def command_of(
    program: Sequence[str], values: Mapping[str, str], way: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a member's program, and its variables as NAME=VALUE.

    {name} in a word is replaced, once: a value may have braces itself. Variables that no word
    names are appended, or put into the environment.
    """
    named = {f"{{{name}}}": name for name in values if f"{{{name}}}" in "\n".join(program)}
    pattern = re.compile("|".join(map(re.escape, named)) or "(?!)")
    words = tuple(pattern.sub(lambda match: values[named[match[0]]], word) for word in program)
    rest = [f"{name}={value}" for name, value in values.items() if name not in named.values()]
    if way == "env":
        return words, tuple(rest)
    return (*words, *(rest if way == "hydra" else [f"--{one}" for one in rest])), ()
