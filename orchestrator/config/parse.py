"""Turn nested mappings into frozen dataclasses: every key is a field, every value has its type."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from orchestrator.common.errors import UsageError, did_you_mean
from orchestrator.protocol.message import Nonsense, decode_value, hints_of

T = TypeVar("T")

# Marks a field of variables: keys in capitals in the same section are its entries.
REST = {"rest": True}
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")

# Keys of the version before, and what to write in their place.
GONE_KEYS = {
    "launch.on_hang": "hang_timeout: 0 leaves a job that hangs alone",
    "launch.on_node_loss": "node_loss_timeout: SECONDS waits for longer",
    "launch.on_head_loss": "leave it out: a job continues without its head",
    "launch.after_any": "after: [EXP] waits for a job that ended well",
    "launch.at": "leave it out, and start it from at(1) or cron",
    "launch.duration": "leave it out: a queue is first come, first served",
    "launch.epilog": "leave it out, and run it after the launch: orchestrator exec COMMAND",
    "launch.grow_every": "leave it out: a job takes back its nodes at its next attempt",
    "launch.numa_binding": "wrap: numactl on the node, or bind in the program",
    "launch.preempt": "leave it out: a queue is first come, first served",
    "launch.priority": "leave it out: a queue is first come, first served",
    "launch.prolog": "hook: FILE runs on each node before its ranks",
    "launch.prolog_timeout": "leave it out: hook: FILE runs on each node before its ranks",
    "launch.relays": "leave it out: the head connects to every node",
    "sync.fanout": "leave it out: the head sends to each node",
    "dataset.columns": "a function named by dataset.target chooses them",
    "distributed.compare_copies": "leave it out: copies of the weights are not compared",
}


def build_dataclass(cls: type[T], data: Any, where: str = "") -> T:
    """Build a dataclass; all unknown keys and wrong values are named in one error."""
    values, problems = collect_fields(cls, data, where)
    raise_problems(problems)
    return cls(**values)


def collect_fields(
    cls: type[T], data: Any, where: str = ""
) -> tuple[dict[str, Any], list[UsageError]]:
    """Return the fields that can be built from the data, and what is wrong with the others."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        return {}, [UsageError(f"{where or 'the config'} must hold keys, not {data!r}")]
    hints = hints_of(typing.cast(Any, cls))
    names = list(hints)
    values: dict[str, Any] = {}
    problems: list[UsageError] = []
    rest = rest_field(cls)
    for key, value in (_gathered(data, rest) if rest else data).items():
        name = where if rest and key == rest else f"{where}.{key}" if where else str(key)
        if key not in names:
            capitals = "; variables are written in capitals" if rest else ""
            if name in GONE_KEYS:
                problems.append(UsageError(f"the key {name} was removed", GONE_KEYS[name]))
                continue
            hint = did_you_mean(str(key), names) or capitals
            known = f"{where} has {', '.join(names)}" if where and not rest else ""
            problems.append(UsageError(f"unknown key {name!r} in the config{hint}", known))
            continue
        try:
            values[key] = _value(hints[key], value, name)
        except UsageError as error:
            problems += getattr(error, "parts", [error])
    return values, problems


class Mistakes(UsageError):
    """Several mistakes of one config, in one table."""

    def __init__(self, parts: Sequence[UsageError]) -> None:
        lines = [f"  {part.what}" + (f": {part.fix}" if part.fix else "") for part in parts]
        super().__init__("\n".join([f"{len(parts)} mistakes in the config:", *lines]))
        self.parts = list(parts)


def raise_problems(problems: Sequence[UsageError]) -> None:
    """Raise what is wrong, if anything is."""
    if len(problems) > 1:
        raise Mistakes(problems)
    for problem in problems:
        raise problem


def rest_field(cls: Any) -> str | None:
    """Return the name of the field marked REST, if the class has one."""
    return next((item.name for item in dataclasses.fields(cls) if "rest" in item.metadata), None)


def _gathered(data: Mapping[Any, Any], rest: str) -> dict[Any, Any]:
    """Move the keys in capitals into the field they belong to."""
    capitals = {k: v for k, v in data.items() if isinstance(k, str) and VARIABLE.fullmatch(k)}
    others = {k: v for k, v in data.items() if k not in capitals}
    if capitals:
        explicit = others.get(rest) or {}
        others[rest] = {**explicit, **capitals} if isinstance(explicit, Mapping) else explicit
    return others


def _value(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build_dataclass(typing.cast(type[Any], kind), value, name)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        value = _variables(value, name) if inner[1] is str else {} if value is None else value
    try:
        return decode_value(kind, _numbers(value) if float in (kind, *inner) else value, where=name)
    except Nonsense as error:
        quotes = "YAML reads off, no, on and yes as true or false: put the word in quotes"
        fix = quotes if isinstance(value, bool) and str in (kind, *inner) else ""
        raise UsageError(str(error), fix) from error


def _numbers(value: Any) -> Any:
    """Return numbers for text such as 3e-4, which YAML takes for text."""
    if isinstance(value, (list, tuple)):
        return list(map(_numbers, value))
    with contextlib.suppress(ValueError, TypeError):
        return float(value) if isinstance(value, str) else value
    return value


def _variables(value: Any, name: str) -> dict[str, str]:
    """Read environment variables; true and false become 1 and 0, as is usual there."""
    if not isinstance(value, (Mapping, types.NoneType)):
        raise UsageError(f"{name} must hold NAME: value pairs, not {value!r}")
    variables = {}
    for key, inner in (value or {}).items():
        if not (isinstance(key, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)):
            # YAML 1.1 reads a bare NO as False.
            raise UsageError(f"{name}: {key!r} cannot name a variable")
        if isinstance(inner, (Mapping, list)):
            raise UsageError(f"{name}.{key} must be one value, not {inner!r}")
        text = "" if inner is None else str(inner)
        variables[key] = str(int(inner)) if isinstance(inner, bool) else text
    return variables


# Timers and sockets overflow at much more than these four months.
LONGEST_WAIT_SECONDS = 1e7


# -- checks of values -------------------------------------------------------------------------


def check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{name} is {value!r}; it can be {', '.join(allowed)}{did_you_mean(value, allowed)}"
        )


def check_bounds(
    name: str,
    value: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> None:
    """Raise UsageError for a number outside of these bounds, or NaN; None is no number."""
    rules = (
        (least, "at least", operator.ge),
        (above, "above", operator.gt),
        (below, "below", operator.lt),
        (most, "at most", operator.le),
    )
    given = [(bound, words, holds) for bound, words, holds in rules if bound is not None]
    if value is not None and not all(holds(value, bound) for bound, _, holds in given):
        allowed = " and ".join(f"{words} {bound:.15g}" for bound, words, _ in given)
        option = name.removeprefix("launch.").replace("_", "-")
        shown = f"--{option} ({name} in a config)" if name.startswith("launch.") else name
        raise UsageError(f"{shown} is {value:.15g}; it must be {allowed}")


def waiting_time(name: str, seconds: float | None) -> None:
    """Raise UsageError for a waiting time that is negative, infinite, above the limit, or NaN."""
    check_bounds(name, seconds, least=0, most=LONGEST_WAIT_SECONDS)


class Section:
    """A section of the config; each of its values is checked by the bounds of its field."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for item in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, item.name)
            bounds = dict(item.metadata.get("bounds", {}))
            choices = bounds.pop("choices", None)
            for one in value if isinstance(value, tuple) else (value,):
                if choices and one is not None:
                    check_one_of(f"{section}.{item.name}", one, choices)
                if bounds:
                    check_bounds(f"{section}.{item.name}", one, **bounds)


def check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise UsageError(f"{name} ({value}) is not a multiple of {of_name} ({of})")
