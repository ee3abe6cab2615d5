"""`orchestrator node cordon|uncordon|list`: the machines that launches pass over."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, OrchestratorError, UsageError, nearest
from orchestrator.head.nodes.node_list import choose, read_nodes
from orchestrator.head.screen import output
from orchestrator.records import cordons
from orchestrator.records.machines import machine_of


def cordon(node_list: Path, hosts: Sequence[str], reason: str) -> int:
    nodes = choose(read_nodes(node_list), hosts)
    machines = list(dict.fromkeys(machine_of(each.node) for each in nodes))
    for each in cordons.add(machines, reason.strip()):
        output.tell(f"{each.machine} is cordoned ({each.words}): launches pass it over")
    return EXIT_DONE


def uncordon(node_list: Path, hosts: Sequence[str]) -> int:
    """Let jobs run on these again, also on machines that are in no list any more."""
    known = cordons.read()
    machines: dict[str, None] = {}
    for host in hosts:
        machines.update(dict.fromkeys([host] if host in known else listed(node_list, host, known)))
    cordons.remove(list(machines))
    for machine in machines:
        was = "was not cordoned" if machine not in known else "is used again"
        output.tell(f"{machine} {was}")
    return EXIT_DONE


def listed(node_list: Path, host: str, known: Iterable[str]) -> list[str]:
    """Return the machines that a name or a number means in the node list."""
    try:
        return [machine_of(each.node) for each in choose(read_nodes(node_list), (host,))]
    except UsageError as error:
        hint = nearest(host, known)
        raise UsageError(f"{host} is not cordoned{hint}", "orchestrator node list") from error


def names() -> list[str]:
    """Return the machines that are cordoned, for completion."""
    try:
        return list(cordons.read())
    except OrchestratorError:
        return []


def show(node_list: Path | None, *, as_json: bool) -> int:
    """Show the machines that are cordoned; with a node list, those of them that it names."""
    known = list(cordons.read().values())
    if node_list is not None:
        machines = {machine_of(node) for node in read_nodes(node_list)}
        known = [each for each in known if each.machine in machines]
    if as_json:
        output.tell(json.dumps({"cordoned": [asdict(each) for each in known]}, indent=1))
        return EXIT_DONE
    if not known:
        output.tell(f"no machine {'of the list ' * (node_list is not None)}is cordoned")
        return EXIT_DONE
    rows: list[list[output.Cell]] = [["MACHINE", "SINCE", "BY", "REASON"]]
    for each in known:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.since))
        rows.append([each.machine, since, each.by, each.reason])
    output.tell(output.table(rows, output.terminal(), headed=True))
    return EXIT_DONE
