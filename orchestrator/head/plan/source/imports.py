"""The imports of one file, and whether they are made in any case, later perhaps, or need not be."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALWAYS, LATER, OPTIONAL = range(3)  # in a function or under an `if`; where an ImportError is caught
CATCH_IMPORTS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
GIVES_UP = ("exit", "_exit", "quit")


@dataclass(frozen=True)
class Import:
    """One `import` or `from ... import` of a file."""

    module: str  # without the dots of a relative one
    names: tuple[str, ...]  # of `from module import names`
    level: int  # the dots
    line: int
    when: int


Body = Sequence[ast.stmt]


def imports_of(tree: ast.Module, *, is_main: bool) -> Iterator[Import]:
    """Yield the imports of a file, whoever runs it: as the program, or by importing it."""
    todo: list[tuple[Body, int]] = [(tree.body, ALWAYS)]
    while todo:
        body, when = todo.pop()
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    yield Import(alias.name, (), 0, statement.lineno, when)
            elif isinstance(statement, ast.ImportFrom):
                names = tuple(alias.name for alias in statement.names)
                module = statement.module or ""
                yield Import(module, names, statement.level, statement.lineno, when)
            else:
                todo += [
                    (inner, max(when, then)) for inner, then in bodies(statement, is_main=is_main)
                ]


def bodies(statement: ast.stmt, *, is_main: bool) -> list[tuple[Body, int]]:
    """Return the statements inside of one, and whether they run in any case."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return [(statement.body, LATER)]
    if isinstance(statement, ast.If):
        return branches(statement, is_main=is_main)
    if isinstance(statement, ast.Try):
        caught = OPTIONAL if any(map(goes_on_without, statement.handlers)) else ALWAYS
        handlers = [(handler.body, OPTIONAL) for handler in statement.handlers]
        return [
            (statement.body, caught),
            *handlers,
            (statement.orelse, caught),
            (statement.finalbody, ALWAYS),
        ]
    if isinstance(statement, ast.With | ast.AsyncWith):
        suppressed = any("ImportError" in ast.dump(item) for item in statement.items)
        return [(statement.body, OPTIONAL if suppressed else ALWAYS)]
    if isinstance(statement, ast.Match):
        return [(case.body, LATER) for case in statement.cases]
    if isinstance(statement, ast.ClassDef):
        return [(statement.body, ALWAYS)]
    if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
        return [(statement.body, ALWAYS), (statement.orelse, ALWAYS)]
    return []


def branches(statement: ast.If, *, is_main: bool) -> list[tuple[Body, int]]:
    test = ast.unparse(statement.test) if is_short(statement.test) else ""
    if test.endswith("TYPE_CHECKING"):
        return [(statement.orelse, ALWAYS)]
    if test in ("__name__ == '__main__'", "'__main__' == __name__"):
        return [(statement.body if is_main else statement.orelse, ALWAYS)]
    return [(statement.body, LATER), (statement.orelse, LATER)]


def is_short(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) or (
        isinstance(test, ast.Compare) and isinstance(test.left, ast.Name | ast.Constant)
    )


def goes_on_without(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler catches a failed import and does not end the program itself."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = [getattr(kind, "id", getattr(kind, "attr", "")) for kind in kinds if kind is not None]
    if handler.type is not None and not set(names) & set(CATCH_IMPORTS):
        return False
    last = handler.body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        called = last.value.func
        return getattr(called, "id", getattr(called, "attr", "")) not in GIVES_UP
    return not isinstance(last, ast.Raise)
