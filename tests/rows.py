"""Rows of a table as one test: pytest's own work for a test is most of what such a row costs.

This is for the workers of a gear, and for parametrized functions all of whose arguments are in the
table. Each row is run, also after one that fails; the message names those that fail. Where pytest
runs alone, and with -k or ::, each row is a test of its own.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.gears import LONG, SLOW, forks_ranks

Rows = list[dict[str, Any]]
WITH_MARKS = type(pytest.param())  # a row that is written as pytest.param(...)


def as_one(module: pytest.Module, name: str, function: object) -> pytest.Function | None:
    """Return the one test of all rows, or nothing where they shall be tests of their own."""
    config = module.config
    if not hasattr(config, "workerinput") or config.option.keyword:
        return None
    marks = list(getattr(function, "pytestmark", ()))
    tables = [mark for mark in marks if mark.name == "parametrize"]
    if not tables or not inspect.isfunction(function) or any("::" in arg for arg in config.args):
        return None
    if not module.istestfunction(function, name):
        return None
    whole = f"{module.nodeid}::{name}["
    if forks_ranks(module.path) or any(entry.startswith(whole) for entry in (*SLOW, *LONG)):
        return None  # rows of more than one gear, or such as cost more than pytest
    rows: Rows = [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*map(rows_of, tables))
    ]
    if not rows or set(rows[0]) != set(inspect.signature(function).parameters):
        return None

    def every_row() -> None:
        run(function, rows)

    every_row.pytestmark = [mark for mark in marks if mark not in tables]  # type: ignore[attr-defined]
    every_row.place_as = function  # type: ignore[attr-defined]
    item = pytest.Function.from_parent(module, name=name, callobj=every_row)
    return None if item.fixturenames else item  # each row has its own of those


def rows_of(table: pytest.Mark) -> Rows:
    """Return nothing for a table that means more than its values."""
    if len(table.args) != 2 or not set(table.kwargs) <= {"ids"}:
        return []
    names, values = table.args
    single = isinstance(names, str) and "," not in names
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = []
    for value in values:
        if isinstance(value, WITH_MARKS):
            row = value
        else:
            row = pytest.param(value) if single else pytest.param(*value)
        if row.marks:
            return []
        rows.append(dict(zip(names, row.values, strict=True)))
    return rows


def run(function: Callable[..., object], rows: Rows) -> None:
    wrong: dict[str, BaseException] = {}
    skipped = None
    for row in rows:
        try:
            function(**row)
        except pytest.skip.Exception as skip:
            skipped = skip
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  told below, all of them
            wrong[f"{row}: {type(error).__name__}: {error}"] = error
    if wrong:
        count = f"{len(wrong)} of {len(rows)} rows; each is a test where this file is named alone"
        raise AssertionError("\n\n".join([count, *wrong])) from next(iter(wrong.values()))
    if skipped:
        raise skipped
