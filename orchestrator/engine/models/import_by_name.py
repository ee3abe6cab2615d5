"""Finds a user's function by its name, package.module:function.

A wrong name is an error with its reason. An exception of the user's own code passes through
unchanged, because its stack trace is what the user needs.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.common.errors import UsageError, did_you_mean


def import_function(key: str, target: str) -> Callable[..., Any]:
    """Return the function that the config's `key` names, first from the working directory."""
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise UsageError(
            f"{key} is {target!r}; it must be package.module:function",
            "such as my_models.big:build for the function build of my_models/big.py",
        )
    module = import_target(key, target, name)
    try:
        # The name may have dots, as in AutoModel.from_pretrained.
        found = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        known = [word for word in dir(error.obj) if callable(getattr(error.obj, word, None))]
        raise UsageError(
            f"{key} is {target!r}, but {module.__file__ or name} defines no {attribute!r}"
            + did_you_mean(str(error.name), known)
        ) from None
    if not callable(found):
        raise UsageError(
            f"{key} is {target!r}, but {attribute!r} is {kind_of(found)}: it cannot be called"
        )
    return found


def import_target(key: str, target: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            # The module exists, but it imports a module that does not.
            raise
        raise UsageError(
            f"{key} is {target!r}, but there is no module {missing!r}",
            f"looked in {here} and where {sys.executable} finds its packages",
        ) from None


def call_function(key: str, target: str, args: Mapping[str, Any], **more: Any) -> Any:
    """Call the named function. `args` come from the config, `more` from the engine."""
    return import_function(f"{key}.target", target)(**args, **more)


def kind_of(thing: object) -> str:
    """Return 'a list' or 'an int', for sentences about the result of a user's function."""
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
