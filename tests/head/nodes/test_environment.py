"""Bootstrap's latest environment is the default."""

from dataclasses import replace

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.nodes import activations
from orchestrator.head.nodes.node_list import Node, parse_nodes
from orchestrator.head.start.nodes import note_remembered, settle_node

MADE = "venv:~/.orchestrator/environments/0123456789abcdef"


def test_settled_uses_remembered_environment_and_notes_it() -> None:
    activations.remember_activations({"a": MADE.replace("0", "f")})
    activations.remember_activations({"a": MADE})
    nodes = [Node("a"), Node("b")]
    assert [settle_node(node, Launch()).activate for node in nodes] == [MADE, None]
    (note,) = note_remembered(nodes, Launch())
    assert note.startswith("a runs in the environment that `orchestrator bootstrap` made")
    assert "--activate none" in note and not note_remembered(nodes[1:], Launch())


@pytest.mark.parametrize(
    ("options", "launch", "activate"),
    [
        ("activate=conda:x", {}, "conda:x"),
        ("activate=conda:x", {"activate": "none"}, "conda:x"),
        ("activate=none", {}, None),
        ("activate=none", {"activate": "conda:x"}, None),
        ("python=/p", {}, None),
        ("wrap='docker exec -i x'", {}, None),
        ("wrap=none", {}, None),
        ("", {"activate": "bootstrap"}, "bootstrap"),
        ("", {"activate": "none"}, None),
        ("", {"python": "/p"}, None),
    ],
)
def test_named_environment_overrides_remembered_one(
    options: str, launch: dict[str, str], activate: str | None
) -> None:
    activations.remember_activations({"a": MADE})
    (there,) = parse_nodes(f"a {options}", "list")
    asked = replace(Launch(), **launch)
    assert settle_node(there, asked).activate == activate
    assert not note_remembered([there], asked)


@pytest.mark.parametrize(
    ("options", "wrap", "result"),
    [("", "enroot", "enroot"), ("wrap=docker", "enroot", "docker"), ("wrap=none", "enroot", None)],
)
def test_wrap_of_node_list_overrides_option(options: str, wrap: str, result: str | None) -> None:
    (node,) = parse_nodes(f"a {options}", "list")
    assert settle_node(node, replace(Launch(), wrap=wrap)).wrap == result
    # A command that launches nothing enters the node as the list says.
    assert bool(node.wrap) == ("docker" in options)
