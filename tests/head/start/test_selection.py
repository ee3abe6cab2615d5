"""Selection of a job's nodes: those of the list, with spares in place of unfit ones."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.cli.help import topic_of
from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.head.connect.reach import Reached
from orchestrator.head.nodes.node_list import parse_nodes
from orchestrator.head.start import selection
from orchestrator.head.start.nodes import Bounds, Nodes, candidate_nodes
from orchestrator.head.start.request import resolve_request
from orchestrator.protocol.facts import Disk
from tests.head.plan.probed import facts

DISK = Disk("/job", 2 * 10**12, 10**12, 0, 0, "/", True)
LIST = "a\nb\nc spare\nd\ne spare\n"


@pytest.mark.parametrize(
    ("nnodes", "least", "most"),
    [
        (None, 3, 3),
        (2, 2, 2),
        ("2:4", 2, 4),
        ("5", 5, 5),
        ("1:9", 1, 9),
    ],
)
def test_candidates_put_spares_last(nnodes: str | int | None, least: int, most: int) -> None:
    nodes, bounds = candidate_nodes(parse_nodes(LIST, "list"), Launch(nnodes=nnodes))
    assert "".join(node.host for node in nodes) == "abdce"
    assert (bounds.least, bounds.most) == (least, most)


def test_candidates_refuse_too_few_nodes() -> None:
    nodes = parse_nodes(LIST, "list")
    with pytest.raises(UsageError, match="--nnodes 6: the node list has 5 nodes"):
        candidate_nodes(nodes, Launch(nnodes=6))


# -- of those that were reached ---------------------------------------------------------------


def reached(text: str, **odd: Any) -> tuple[Reached, ...]:
    """The nodes of a list, spares last; `odd` says what is different on some of them."""
    nodes = sorted(parse_nodes(text, "list"), key=lambda node: node.spare)
    channel = SimpleNamespace(connection=SimpleNamespace(address="127.0.0.1", way=""))
    known = facts(port=29500, disk=DISK, shm=DISK)
    return tuple(
        Reached(node, known.replace(boot=node.host, **odd.get(node.host, {})), cast(Any, channel))
        for node in nodes
    )


def chosen(nodes: tuple[Reached, ...], least: int, most: int, check: str = "quick") -> Nodes:
    request = resolve_request(LaunchArguments(program=("train.py",)), ["master_launch"])
    launch = replace(request.config.launch, check=check)
    request = replace(request, config=replace(request.config, launch=launch))
    there = Nodes(
        *(cast(Any, None), cast(Any, None), nodes),
        bounds=Bounds(least, most),
        master=nodes[0].node.name,
        lost=((parse_nodes("x", "list")[0], NodeError("it does not answer")),),
    )
    return selection.select_nodes(request, there, hold=False)


NO_TORCH: dict[str, Any] = {"torch": ""}


@pytest.mark.parametrize(
    ("odd", "least", "most", "nodes", "spares"),
    [
        ("", 3, 3, "abd", "ce"),
        ("b", 3, 3, "adc", "e"),
        ("bd", 3, 3, "ace", ""),
        ("bc", 3, 3, "ade", ""),
        # An unfit spare is not used.
        ("c", 3, 3, "abd", "e"),
        ("bcd", 3, 3, "abd", "e"),  # too few are fit: the check before the start says which
        ("bcde", 1, 5, "a", ""),
        ("", 1, 5, "abdce", ""),
    ],
)
def test_chosen_replaces_unfit_node_by_spare(
    odd: str, least: int, most: int, nodes: str, spares: str
) -> None:
    there = chosen(reached(LIST, **dict.fromkeys(odd, NO_TORCH)), least, most)
    assert "".join(node.node.host for node in there.reached) == nodes
    assert "".join(node.node.host for node in there.spares) == spares
    assert not any(node.node.spare for node in there.reached)
    assert all(node.node.spare for node in there.spares)
    assert there.notes[0] == "x is skipped: it does not answer"


def test_chosen_notes_each_change() -> None:
    there = chosen(reached(LIST, b=NO_TORCH, e=NO_TORCH), 3, 3)
    assert there.notes[1:] == (
        "b is skipped: /usr/bin/python3 has no torch",
        "c (spare) takes its place",
        "e cannot be a spare: /usr/bin/python3 has no torch",
    )


def test_check_refusal_is_about_errors_not_warnings() -> None:
    request = resolve_request(LaunchArguments(program=("train.py",)), ["master_launch"])
    nodes = reached("a\nb", a={"clock_offset": 2.5}, b=NO_TORCH)
    there = Nodes(cast(Any, None), cast(Any, None), nodes, bounds=Bounds(2, 2), master="a")
    with pytest.raises(CheckFailed, match="clock:") as refused:
        selection.check_nodes(request, there)
    assert topic_of(refused.value.about) == "no-torch" and "clock" not in refused.value.about


def test_chosen_without_check_keeps_every_node() -> None:
    there = chosen(reached(LIST, b=NO_TORCH), 3, 3, check="none")
    assert [node.node.host for node in there.reached] == ["a", "b", "d"]
