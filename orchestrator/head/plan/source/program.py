"""Reads a program and the modules of its own that it imports; nothing is imported or run."""

from __future__ import annotations

import ast
import functools
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.common.program import program_at
from orchestrator.head.plan.model import Target
from orchestrator.head.plan.source.imports import ALWAYS, Import, imports_of
from orchestrator.head.plan.source.paths import ASKING, PLACES, WRITES, Touch, touches
from orchestrator.head.plan.source.values import (
    Options,
    Scope,
    Values,
    dotted,
    last_name,
    options_of,
    scopes,
    typed_options,
)

MOST_FILES = 300
LARGEST_BYTES = 1 << 20
LONGEST_SECONDS = 5.0  # of this processor
MAIN = "__main__.py"
SOURCES = "src"
ADD_TO_PATH = ("sys.path.append", "sys.path.insert")


@dataclass(frozen=True)
class Outside:
    """A module that is not the program's own, and where it is imported first."""

    module: str  # its outermost package
    file: str
    line: int
    when: int
    full: str = ""  # google.protobuf


@dataclass(frozen=True)
class Program:
    """Holds what was read: the files, what they import from elsewhere, and what they open."""

    files: tuple[str, ...] = ()
    imports: tuple[Outside, ...] = ()
    touches: tuple[Touch, ...] = ()
    problems: tuple[str, ...] = ()
    moves: bool = False  # it changes its directory: relative paths are not known


@dataclass
class File:
    """One file of the program."""

    path: Path
    name: str  # as it is shown: relative to the directory of the launch
    tree: ast.Module
    when: int

    @functools.cached_property
    def scopes(self) -> list[Scope]:
        return scopes(self.tree, ASKING)


@dataclass
class Reading:
    """The files that were read so far, and those that they lead to."""

    here: Path
    roots: list[Path]
    files: dict[Path, File] = field(default_factory=dict)
    outside: dict[str, Outside] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    until: float = field(default_factory=lambda: time.thread_time() + LONGEST_SECONDS)

    def shown(self, path: Path) -> str:
        return str(path.relative_to(self.here)) if path.is_relative_to(self.here) else str(path)

    def read(self, first: Iterable[Path]) -> None:
        """Read these files, the program's own, and all that they import from its directories."""
        main = list(first)
        todo = [(path, ALWAYS) for path in main]
        while todo:
            path, when = todo.pop(0)
            known = self.files.get(path)
            if known is not None and known.when <= when:
                continue
            if len(self.files) >= MOST_FILES or time.thread_time() > self.until:
                self.problems.append(f"only the first {len(self.files)} files were read")
                return
            tree = known.tree if known is not None else self.parse(path)
            if tree is None:
                continue
            file = File(path, self.shown(path), tree, when)
            self.files[path] = file
            self.add_roots(file)
            for item in imports_of(tree, is_main=path in main):
                then = max(when, item.when)
                todo += [(found, then) for found in self.follow(path, item, then)]

    def parse(self, path: Path) -> ast.Module | None:
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_BYTES + 1)
            if len(data) > LARGEST_BYTES:
                self.problems.append(f"{self.shown(path)} is too large to be read")
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a stranger's "\d"
                return ast.parse(data)
        except SyntaxError as error:
            line = f", line {error.lineno}" if error.lineno else ""
            self.problems.append(f"{self.shown(path)}{line}: {error.msg} (for Python here)")
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            self.problems.append(f"{self.shown(path)} cannot be read: {error}")
        return None

    # -- modules ----------------------------------------------------------------------------

    def follow(self, path: Path, item: Import, when: int) -> list[Path]:
        """Return the files of ours that an import leads to; note a module from elsewhere."""
        if item.level:
            base = path.parent
            for _ in range(item.level - 1):
                base = base.parent
            return own_files(base, item)[0] if base.is_relative_to(self.here) else []
        for root in [*self.roots]:
            files, there = own_files(root, item)
            if there:
                return files
        top = item.module.partition(".")[0]
        known = self.outside.get(top)
        if top and top != "__main__" and (known is None or known.when > when):
            line = item.line
            full = item.module if "." in item.module else f"{top}.{(*item.names, '')[0]}"
            self.outside[top] = Outside(top, self.shown(path), line, when, full)
        return []

    def add_roots(self, file: File) -> None:
        """Look also where the program adds to sys.path, as far as that can be seen."""
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and dotted(node.func) in ADD_TO_PATH:
                place = node.args[-1] if node.args else None
                text = Values(str(file.path), {}, {}).of(place, file.scopes[0])
                if text is not None and text.whole:
                    self.roots.append(self.here / text.text)


def own_files(root: Path, item: Import) -> tuple[list[Path], bool]:
    """Return the files below a directory that an import reads, and whether it leads there."""
    files: list[Path] = []
    there = False
    place = root
    for part in item.module.split(".") if item.module else ():
        place = place / part
        package = place / "__init__.py"
        if is_file(package):
            files.append(package)
            there = True
        elif is_file(place.with_name(f"{part}.py")):
            return [*files, place.with_name(f"{part}.py")], True
        elif not place.is_dir():
            return files, there
    for name in item.names:
        inner = place / name
        if is_file(inner / "__init__.py"):
            files.append(inner / "__init__.py")
        elif is_file(place / f"{name}.py"):
            files.append(place / f"{name}.py")
        else:
            continue
        there = True
    # A directory without __init__.py takes no package's place.
    return files, there or (not item.names and place != root and place.is_dir())


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long for this file system
        return False


# -- a program ----------------------------------------------------------------------------------


def read(target: Target, here: Path, python_path: str = "") -> Program:
    """Read a program as a launch in this directory would run it."""
    if target.kind == "engine":
        return Program()
    more = [here / place for place in python_path.split(":") if place]
    if target.kind == "module":
        reading = Reading(here, [here, *more])
        item = Import(target.name, (MAIN.removesuffix(".py"),), 0, 0, ALWAYS)
        main = reading.follow(here / "-m", item, ALWAYS)
        if not main:  # where a package is that would be installed: nodes need its path
            reading.roots.append(here / SOURCES)
            main = reading.follow(here / "-m", item, ALWAYS)
    else:
        file = main_file(target.name, here)
        if file is None:
            return Program()
        reading = Reading(here, [file.parent, *more])
        main = [file]
    reading.read(main)
    return of_files(reading, target.args)


def main_file(name: str, here: Path) -> Path | None:
    """Return the Python file that a name stands for; None for a command, a notebook, a shell."""
    path = here / name
    try:
        if path.is_dir():
            path = path / MAIN
        if not path.is_file() or path.suffix not in (".py", ""):
            return None
        kind = program_at(str(path), str(here))[0] if path.suffix != ".py" else "script"
    except (OSError, ValueError):
        return None
    return path if kind == "script" else None


def of_files(reading: Reading, arguments: Sequence[str]) -> Program:
    files = list(reading.files.values())
    options: Options = {}
    for file in files:
        for name, default in options_of(file.tree, any_typed=bool(arguments)).items():
            options[name] = default if name not in options else None
    typed = typed_options(arguments)
    found = [
        Touch(path, WRITES, files[0].name, 0)
        for option, path in typed.items()
        if option in PLACES and files
    ]
    moves = False
    for file in files:  # the program itself comes first
        if time.thread_time() > reading.until:
            reading.problems.append("what the other modules open: it took too long")
            break
        found += touches(file.scopes, Values(file.name, options, typed))
        moves = moves or any(map(changes_directory, file.scopes))
    order = {file.name: number for number, file in enumerate(files)}
    return Program(
        files=tuple(file.name for file in files),
        imports=tuple(sorted(reading.outside.values(), key=lambda o: (o.when, o.file, o.line))),
        touches=tuple(sorted(found, key=lambda touch: (order[touch.file], touch.line))),
        problems=tuple(dict.fromkeys(reading.problems)),
        moves=moves,
    )


def changes_directory(scope: Scope) -> bool:
    return any(last_name(call.func) in ("chdir", "fchdir") for call, _ in scope.calls)
