"""`orchestrator nodes`: list what each machine of the node list is."""

from __future__ import annotations

import json
from collections.abc import Sequence

from orchestrator.common import text
from orchestrator.common.errors import EXIT_DONE, EXIT_NODE
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.nodes import machine
from orchestrator.head.nodes.machine import Machine
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Cell, Look
from orchestrator.head.start.machines import find_machines
from orchestrator.head.start.request import resolve

LOST = "bold red"


def nodes(arguments: LaunchArguments, *, as_json: bool, color: bool | None) -> int:
    machines = find_machines(resolve(arguments))
    if as_json:
        shown = [machine.to_json(described) for described in machines]
        output.tell(json.dumps({"nodes": shown}, indent=1))
    else:
        output.tell(to_text(machines, output.look(color)))
    return EXIT_DONE if all(described.reached for described in machines) else EXIT_NODE


def to_text(machines: Sequence[Machine], look: Look) -> str:
    """Draw one table, or two on a screen that is too narrow, and say why nodes are missing."""
    names = [(title(described), "" if described.reached else LOST) for described in machines]
    hosts = ["HOST", "CPUS", "MEMORY", "DISK FREE", "TORCH"]
    cards = ["GPUS", "DRIVER", "NETWORK"]
    host_rows = [host_cells(described) for described in machines]
    card_rows = [card_cells(described) for described in machines]

    def draw(headings: list[str], rows: Sequence[Sequence[Cell]], look: Look) -> str:
        body = [[name, *row] for name, row in zip(names, rows, strict=True)]
        return output.table([["NODE", *headings], *body], look, headed=True)

    together = [[*left, *right] for left, right in zip(host_rows, card_rows, strict=True)]
    plain = draw([*hosts, *cards], together, output.PLAIN)
    if look.width is None or max(map(len, plain.splitlines())) <= look.width:
        parts = [draw([*hosts, *cards], together, look)]
    else:
        parts = [draw(hosts, host_rows, look), draw(cards, card_rows, look)]
    lost = [described for described in machines if not described.reached]
    if lost:
        parts.append(reasons(lost, len(machines)))
    cordoned = [described for described in machines if described.cordoned]
    if cordoned:
        parts.append("\n".join(output.printable(cordon_line(described)) for described in cordoned))
    return "\n\n".join(parts)


def title(described: Machine) -> str:
    """Name a machine, and what sets it apart from those that the next launch takes."""
    spare, cordoned = " (spare)" * described.spare, " (cordoned)" * bool(described.cordoned)
    return f"{described.name}{spare}{cordoned}"


def cordon_line(described: Machine) -> str:
    name = described.name
    return f"{name} is cordoned ({described.cordoned}): orchestrator node uncordon {name}"


def host_cells(described: Machine) -> list[Cell]:
    if not described.reached:
        return [("unreachable", LOST), "-", "-", "-", "-"]
    return [
        described.hostname,
        str(described.cpus),
        text.size(described.memory, binary=True),
        machine.disk_text(described),
        described.torch or ("none", "yellow"),
    ]


def card_cells(described: Machine) -> list[Cell]:
    if not described.reached:
        return ["-", "-", "-"]
    return [
        machine.gpu_text(described),
        described.driver or "-",
        machine.network_text(described),
    ]


def reasons(lost: Sequence[Machine], total: int) -> str:
    """Name why each missing node could not be reached; unwrapped, as fixes are to be copied."""
    lines = [f"{len(lost)} of {text.plural(total, 'node')} cannot be reached"]
    for described in lost:
        lines.append(f"  {described.name}: {described.problem}")
        lines += [f"    -> {described.fix}"] * bool(described.fix)
    return output.printable("\n".join(lines))
