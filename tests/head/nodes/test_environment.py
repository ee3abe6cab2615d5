"""Bootstrap's latest environment is the default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.nodes import activations
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.start.nodes import note_remembered, settled

MADE = "venv:~/.orchestrator/environments/0123456789abcdef"


def test_what_is_remembered_is_used_and_said() -> None:
    activations.remember({"a": MADE.replace("0", "f")})
    activations.remember({"a": MADE})
    nodes = [Node("a"), Node("b")]
    assert [settled(node, Launch()).activate for node in nodes] == [MADE, None]
    (note,) = note_remembered(nodes, Launch())
    assert note.startswith("a runs in the environment that `orchestrator bootstrap` made")
    assert "--activate none" in note and not note_remembered(nodes[1:], Launch())


@pytest.mark.parametrize(
    ("node", "launch", "activate"),
    [
        ({"activate": "conda:x"}, {}, "conda:x"),
        ({"activate": "none"}, {}, None),
        ({"python": "/p"}, {}, None),
        ({"wrap": "docker exec -i x"}, {}, None),
        ({}, {"activate": "bootstrap"}, "bootstrap"),
        ({}, {"activate": "none"}, None),
        ({}, {"python": "/p"}, None),
    ],
)
def test_what_is_named_wins(
    node: dict[str, str], launch: dict[str, str], activate: str | None
) -> None:
    activations.remember({"a": MADE})
    there, asked = replace(Node("a"), **node), replace(Launch(), **launch)
    assert settled(there, asked).activate == activate
    assert not note_remembered([there], asked)
