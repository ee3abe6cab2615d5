"""Refuse at once, by its name, an argument that is unknown or of another type than annotated."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.common.errors import UsageError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])
# What is taken for a type, and how it is called in a sentence.
KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    Path: (Path, "a path"),
    collections.abc.Callable: (collections.abc.Callable, "a function"),
    collections.abc.Mapping: (collections.abc.Mapping, "a dict"),
    collections.abc.Sequence: (collections.abc.Sequence, "a list"),
}
SHOWN = 60  # characters of a wrong value


def checked(**fixes: str | None) -> Callable[[Function], Function]:
    """Check the arguments of a function before it runs.

    `fixes` are what to type instead, by argument; None leaves the check to the function itself.
    """

    def around(function: Function) -> Function:
        signature = inspect.signature(function)
        called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        wanted: dict[str, list[Any]] = {}

        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            if not wanted:  # the names in annotations are known by now
                wanted.update(types_of(function))
            for name, value in bound(called, signature, args, more).items():
                if fixes.get(name, "") is not None:
                    refuse_other(name, value, wanted.get(name, []), fixes.get(name) or "")
            return function(*args, **more)

        return typing.cast(Function, call)

    return around


def bound(
    name: str, signature: inspect.Signature, args: Sequence[Any], more: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments by name, or refuse one that there is not, or is missing."""
    known = [each for each in signature.parameters if each != "self"]
    try:
        return signature.bind(*args, **more).arguments
    except TypeError as error:
        unknown = next((each for each in more if each not in known), "")
        what = f"has no argument {unknown!r}{nearest(unknown, known)}" if unknown else str(error)
        raise UsageError(f"{name}() {what}", f"it takes {', '.join(known)}") from None


def types_of(function: Callable[..., Any]) -> dict[str, list[Any]]:
    """Give the types that each argument may have; none for what may be anything."""
    found = {}
    for name, hint in typing.get_type_hints(function).items():
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        options = [typing.get_origin(o) or o for o in (typing.get_args(hint) if union else (hint,))]
        known = all(isinstance(option, type) and option is not Any for option in options)
        found[name] = options if known else []
    return found


def refuse_other(name: str, value: Any, options: list[Any], fix: str) -> None:
    if not options or any(fits(value, option) for option in options):
        return
    names = [o for o in options if o is not types.NoneType]
    words = [KINDS[o][1] if o in KINDS else f"a {o.__name__}" for o in names]
    shown, wanted = repr(value), " or ".join(words)
    if len(shown) > SHOWN:
        raise UsageError(f"{name}= is a {type(value).__name__}, not {wanted}", fix)
    raise UsageError(f"{name}={shown} is not {wanted}", fix)


def fits(value: Any, option: Any) -> bool:
    if isinstance(value, bool) and option in (int, float):
        return False
    return isinstance(value, KINDS[option][0] if option in KINDS else option)
