"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, UsageError
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.doctor import examination, last_look
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Column, Table, Terminal
from orchestrator.head.start.code import expect_code
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import resolve
from orchestrator.head.start.selection import diagnose
from orchestrator.records import cordons, machines
from orchestrator.records.machines import machine_of


def examine(arguments: LaunchArguments, *, full: bool, hints: bool) -> int:
    began = time.monotonic()
    request = resolve(arguments)
    request, nodes = expect_code(request, try_all(request))
    diagnosis = diagnose(request, nodes, full=full)
    diagnosis = replace(diagnosis, seconds=time.monotonic() - began)
    try:
        last_look.note(nodes.source.nodes, diagnosis.findings)
    except UsageError as error:
        output.complain(f"orchestrator: later views do not know of this look: {error.what}")
    words = partial(examination.to_text, diagnosis, hints=hints)
    output.result(examination.to_json(diagnosis), words)
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE


# -- history ------------------------------------------------------------------------------------
# `orchestrator doctor --history`: what each machine did wrong in earlier jobs.

SHOWN = 5  # incidents of one machine, the newest; --json has all
NOTHING_REMEMBERED = "no machine has failed or been slow in a job of this login"


def when(incident: machines.Incident) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(incident.time))


INCIDENTS: Table[machines.Incident] = Table(
    (
        Column("", when),
        Column("", lambda incident: incident.experiment),
        Column("", lambda incident: incident.kind),
        Column("", lambda incident: incident.what),
    ),
    indent=2,
)


def show(node_list: Path) -> int:
    """Show the machines of the list, and all others of which something is remembered."""
    listed = [machine_of(node) for node in read_nodes(node_list)] if node_list.exists() else []
    known = machines.by_machine(listed)
    words = {machine: cordon.words for machine, cordon in cordons.read().items()}
    data = [
        {
            "machine": machine,
            "cordoned": words.get(machine),
            "incidents": [without_machine(incident) for incident in incidents],
        }
        for machine, incidents in known.items()
    ]
    output.result(
        {"machines": data},
        lambda terminal: "\n".join(history_text(known, words, terminal)) or NOTHING_REMEMBERED,
    )
    return EXIT_DONE


def history_text(
    known: Mapping[str, Sequence[machines.Incident]],
    cordoned: Mapping[str, str],
    terminal: Terminal,
) -> Iterator[str]:
    for machine, incidents in known.items():
        kinds = Counter(incident.kind for incident in incidents)
        counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
        state = f" (cordoned: {cordoned[machine]})" if machine in cordoned else ""
        yield output.printable(f"{machine}{state}: {counts or 'nothing remembered'}")
        if len(incidents) > SHOWN:
            yield f"  {len(incidents) - SHOWN} before these: --json has them"
        if incidents:
            yield INCIDENTS.text(incidents[-SHOWN:], terminal)


def without_machine(incident: machines.Incident) -> dict[str, object]:
    return {name: value for name, value in asdict(incident).items() if name != "machine"}
