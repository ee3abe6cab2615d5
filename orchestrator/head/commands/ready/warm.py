"""`orchestrator warm`: list the processes that wait on the nodes for the next job, or end them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_NODE
from orchestrator.config.launch import Where
from orchestrator.head.chores.numbered_node import choose
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.held import control
from orchestrator.head.held.transport import HeldTransport
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.screen.output import tell
from orchestrator.head.status import containers
from orchestrator.head.status import warm as warm_nodes


def warm(where: Where, wanted: str | None, *, off: bool, as_json: bool) -> int:
    """Show what waits on each node, or end it."""
    ssh = HeldTransport(SshConfig(where.ssh_config))
    chosen = choose(read_nodes(where.node_list), () if wanted is None else (wanted,))
    nodes = [target.node for target in chosen]
    places = [*nodes, *containers.of_nodes(nodes, where, containers.may_be_warm)]
    if not off:
        return show(ssh, places, as_json=as_json)
    code = end(ssh, places, as_json=as_json)
    if wanted is None:  # all of it: also what waits on this machine
        control.end()
    return code


def show(ssh: Transport, places: Sequence[Node], *, as_json: bool) -> int:
    answers = warm_nodes.ask(ssh, places)
    text = warm_nodes.to_json if as_json else warm_nodes.to_text
    tell(text(warm_nodes.news(places, answers)))
    return EXIT_DONE if warm_nodes.all_reached(answers) else EXIT_NODE


def end(ssh: Transport, places: Sequence[Node], *, as_json: bool) -> int:
    """End what waits on these nodes, and prove it."""
    answers = warm_nodes.end(ssh, places)
    text = warm_nodes.to_json if as_json else warm_nodes.receipts
    tell(text(warm_nodes.news(places, answers)))
    if not warm_nodes.all_gone(answers):
        return EXIT_FAILED
    return EXIT_DONE if warm_nodes.all_reached(answers) else EXIT_NODE
