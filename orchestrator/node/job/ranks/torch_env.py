"""Reads from a program's source what it does with torch: variables set too late, and training.

A rank forked from torchrun has imported torch already. If the program's own file sets a variable
that torch reads then before it imports torch, the rank starts afresh. A program that trains makes
torch import as much again: torchrun does that for all ranks.
Imports nothing of ours: rank.py loads it by its path, into the process of the user's program.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

READ_AT_IMPORT = re.compile(r"(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|DNNL|ONEDNN|ATEN|PYTORCH|TORCH)_?")
READ_LATER = re.compile(
    r"(PYTORCH_(\w+_)?ALLOC_CONF|TORCH_(NCCL|FR)_\w+|TORCHELASTIC_\w+|TORCHINDUCTOR_CACHE_DIR)$"
)
# An optimizer imports this when it is made: without it, 1.7 s in each rank.
OF_OPTIMIZERS = "torch._dynamo"
TRAINS = re.compile(
    rb"\boptim|Trainer\b|\bbackward\(|\b(lightning|accelerate|deepspeed|fully_shard)\b"
)
IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\w+))?", re.M)
MOST_FILES = 50
MOST_BYTES = 1 << 20


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
    early = ((name, node) for name, node in changes(nodes, environ) if node.lineno < torch)
    return next(early, ("", None))[0]


def changes(nodes: list[Any], environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield what a program sets of what torch reads when it is imported, and where."""
    for node in nodes:
        for name, value in settings(node):
            constant = ast.literal_eval(value) if isinstance(value, ast.Constant) else None
            if matters(name) and environ.get(name) != constant:
                yield name, node


def file_of(target: Mapping[str, Any], workdir: str) -> str:
    """Return the file that Python would run; one that is not there is some installed module's."""
    path = os.path.join(workdir, target["name"])
    if target["kind"] == "module":
        path = os.path.join(workdir, *target["name"].split("."))
        path = path if os.path.isdir(path) else path + ".py"
    return os.path.join(path, "__main__.py") if os.path.isdir(path) else path


def will_train(
    target: Mapping[str, Any], workdir: str, environ: Mapping[str, str], config: Any = None
) -> bool:
    """Tell whether the program's own files train, and set nothing that an optimizer's import reads.

    The built-in engine does; its user's own files are those that the config names. To be wrong
    costs time alone: what is imported here is imported by each rank otherwise.
    """
    if target["kind"] not in ("script", "module", "engine"):
        return False
    path = file_of(target, workdir)
    texts = [sources(path, workdir)]
    if target["kind"] == "engine":
        modules = [{"kind": "module", "name": name} for name in modules_in(config)]
        texts = [sources(file_of(module, workdir), workdir) for module in modules]
    installed = target["kind"] == "engine" or not os.path.isfile(path)
    found = target["kind"] != "script" and installed and "train" in target["name"]
    for source in itertools.chain(*texts):
        found = found or bool(TRAINS.search(source))
        if b"environ" in source or b"putenv" in source:
            try:
                nodes = list(ast.walk(ast.parse(source)))
            except (SyntaxError, ValueError, RecursionError):
                return False
            if any(changes(nodes, environ)):
                return False
    return found


def modules_in(config: Any) -> Iterator[str]:
    """Yield the modules that a config names, as in `model.target: package.module:function`."""
    for section in config.values() if isinstance(config, dict) else ():
        for value in section.values() if isinstance(section, dict) else ():
            if isinstance(value, str) and re.match(r"[\w.]+:[\w.]+$", value):
                yield value.partition(":")[0]


def sources(path: str, workdir: str) -> Iterator[bytes]:
    """Yield a program's file, and those that it imports from beside it or from where it runs."""
    places = list(dict.fromkeys([os.path.dirname(path), workdir]))
    files = [path]
    for at in range(MOST_FILES):
        if at == len(files):
            return
        try:
            with open(files[at], "rb") as file:
                source = file.read(MOST_BYTES)
        except OSError:
            continue
        yield source
        for match in IMPORT.finditer(source):
            module, name = (os.fsdecode(word or b"") for word in match.groups())
            if module.startswith("."):  # of its own package
                places.append(os.path.dirname(files[at]))
            stem = os.path.join(*(module.strip(".") or name).split("."))
            tails = (
                stem + ".py",
                os.path.join(stem, "__init__.py"),
                os.path.join(stem, name + ".py"),
            )
            near = (os.path.join(place, tail) for place in dict.fromkeys(places) for tail in tails)
            files += [one for one in near if one not in files and os.path.isfile(one)]


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
            for argument in node.args:
                if isinstance(argument, ast.Dict):
                    for key, value in zip(argument.keys, argument.values):  # noqa: B905  Python 3.9
                        yield from constant_name(key, value)


def is_environ(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def constant_name(key: ast.AST | None, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield key.value, value
