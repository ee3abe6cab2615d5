"""A function goes only where the same Python can run it."""

from __future__ import annotations

import sys

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start import payload
from tests.head.plan.probed import facts

MINE = "{}.{}".format(*sys.version_info[:2])


def nodes(*versions: str) -> list[ProbedNode]:
    return [
        ProbedNode(Node(f"n{i}"), facts(python_version=version), "")
        for i, version in enumerate(versions)
    ]


def test_another_minor_version_is_named() -> None:
    payload.check_python(nodes(f"{MINE}.0", f"{MINE}.99"))
    with pytest.raises(CheckFailed, match=rf"is {MINE} here:\n    n1 \(3\.1\.7, /usr") as raised:
        payload.check_python(nodes(f"{MINE}.0", "3.1.7", f"{MINE}.1"))
    assert f"a Python {MINE} that has torch" in raised.value.fix
