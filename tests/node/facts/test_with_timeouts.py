from __future__ import annotations

import threading
from typing import Any

import pytest

from orchestrator.node.facts.with_timeouts import gather


def fail() -> Any:
    raise OSError(5, "Input/output error")


def test_parts_that_work_and_one_that_does_not() -> None:
    found, problems = gather(20.0, {"a": lambda: 1, "b": fail, "c": lambda: None})
    assert found == {"a": 1, "c": None}
    assert problems == {"b": "[Errno 5] Input/output error"}


def test_what_hangs_holds_up_nothing_behind_it() -> None:
    for_ever = threading.Event()
    parts: dict[str, Any] = {"a": lambda: 1, "b": for_ever.wait, "c": lambda: 3, "d": for_ever.wait}
    try:
        found, problems = gather(0.3, {**parts, "e": lambda: 5})
    finally:
        for_ever.set()
    assert found == {"a": 1, "c": 3, "e": 5}
    words = "it did not answer within 0.3 s"
    assert problems == {"b": words, "d": words}


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        gather(20.0, {"a": lambda: 1 / 0})


def test_nothing_at_all() -> None:
    assert gather(1.0, {}) == ({}, {})
