"""What a launch may not do on machines with rules, and what it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.connect.reach import Reached
from orchestrator.head.start.claims import rules
from orchestrator.head.start.request import resolve
from orchestrator.protocol.facts import Policy
from orchestrator.protocol.requests.start import Page


def node(name: str, **policy: Any) -> Reached:
    kept = Policy(file=f"/etc/{name}.yaml", **policy)
    named = SimpleNamespace(node=SimpleNamespace(name=name), facts=SimpleNamespace(policy=kept))
    return cast(Reached, named)


NODES = [node("a", time_limit=7200.0), node("b", time_limit=3600.0, gpus_per_user=4), node("c")]


def check(limit: str | None, *nodes: Reached) -> None:
    arguments = LaunchArguments(program=("train.py",), launch={"time_limit": limit})
    rules.check_time(resolve(arguments, ["master_launch"]), nodes)


def test_the_longest_time() -> None:
    """The strictest of the nodes counts; without a rule, no limit is needed."""
    check("60m", *NODES)
    check(None, NODES[2])
    for limit, has in ((None, "no --time-limit"), ("2h", "--time-limit 2h")):
        with pytest.raises(CheckFailed) as error:
            check(limit, *NODES)
        assert error.value.what == (
            "a job has to end within 1 h 00 min (time_limit in /etc/b.yaml on b), and this one has"
            f" {has}; nothing was started"
        )
        assert error.value.fix.startswith("--time-limit 1h, ")


def test_the_most_gpus_of_a_user() -> None:
    def too_many(own: int, more: int, leaving: int = 0, most: int = 4) -> str:
        kept = Policy(file="/etc/b.yaml", gpus_per_user=most)
        books = {"a": Page(entries=()), "b": Page(entries=(), own=own, policy=kept)}
        return rules.too_many(books, more, leaving)

    assert not too_many(2, 2) and not too_many(9, 9, most=0)
    assert too_many(2, 3) == (
        "your jobs have 2 already, and 3 are wanted; each user may have 4 GPUs"
        " (gpus_per_user in /etc/b.yaml on b)"
    )
    assert too_many(0, 8).startswith("8 are wanted; ")
    assert not too_many(4, 4, leaving=4) and too_many(5, 4, leaving=4)
