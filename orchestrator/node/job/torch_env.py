"""Finds the variables that torch reads while it is imported and that a program sets before that.

A rank forked from torchrun has imported torch already. If the program's own file sets such a
variable before it imports torch, the rank starts afresh; if another module does, it says so.
Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

READ_AT_IMPORT = re.compile(r"(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)_?")
READ_LATER = re.compile(r"(PYTORCH_(\w+_)?ALLOC_CONF|TORCH_NCCL_\w+|TORCHELASTIC_\w+)$")


def matters(name: str) -> bool:
    return bool(READ_AT_IMPORT.match(name)) and not READ_LATER.match(name)


def set_early(path: str, environ: Mapping[str, str]) -> str:
    """Return a variable that the program in this file sets before it imports torch, or nothing."""
    try:
        with open(path, "rb") as file:
            source = file.read()
        if b"environ" not in source and b"putenv" not in source:
            return ""  # parsing takes milliseconds of each rank's start
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""  # Python itself says what is wrong
    nodes: list[Any] = list(ast.walk(tree))
    torch = min((n.lineno for n in nodes if imports_torch(n)), default=sys.maxsize)
    for node in nodes:
        for name, value in settings(node):
            constant = ast.literal_eval(value) if isinstance(value, ast.Constant) else None
            early = getattr(node, "lineno", torch) < torch
            if early and matters(name) and environ.get(name) != constant:
                return name
    return ""


def imports_torch(node: Any) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "torch" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"


def settings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the variables of the environment that a piece of source sets, with their values."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and is_environ(target.value):
                yield from constant_name(target.slice, node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "putenv" or (
            node.func.attr == "setdefault" and is_environ(node.func.value)
        ):
            if len(node.args) == 2:
                yield from constant_name(node.args[0], node.args[1])
        elif node.func.attr == "update" and is_environ(node.func.value):
            yield from ((word.arg, word.value) for word in node.keywords if word.arg)
            for given in node.args:
                if isinstance(given, ast.Dict):
                    for key, value in zip(given.keys, given.values):  # noqa: B905  Python 3.9
                        yield from constant_name(key, value)


def is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def constant_name(key: ast.AST | None, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield key.value, value


class Watched(os._Environ):  # type: ignore[type-arg]
    """os.environ, which says once when a variable comes too late for torch."""

    def __setitem__(self, name: Any, value: Any) -> None:
        before = self.get(name)
        super().__setitem__(name, value)
        if before != value and matters(name) and not has_torch():
            os.environ.__class__ = os._Environ
            sys.stderr.write(
                f"orchestrator: {name} is set before the program imports torch, but this rank was"
                f" forked from a process that has imported it: --env {name}={value} sets it in"
                " time, --start plain imports torch anew\n"
            )


def has_torch() -> bool:
    """Tell whether the program, or the module that sets a variable, has imported torch."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__") in ("os", "_collections_abc"):
        frame = frame.f_back
    things = [*vars(sys.modules["__main__"]).values(), *frame.f_globals.values()]
    return any(map(of_torch, things))


def of_torch(thing: object) -> bool:
    name = ""
    if isinstance(thing, types.ModuleType):
        name = thing.__name__
    elif isinstance(thing, (type, types.FunctionType)):
        name = thing.__module__ or ""
    return name.partition(".")[0] == "torch"


def watch() -> None:
    """Say it when a variable is set too late."""
    if "torch" in sys.modules:
        os.environ.__class__ = Watched
