"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.doctor import report
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Cell
from orchestrator.head.start.code import expect_code
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import resolve
from orchestrator.head.start.selection import diagnose
from orchestrator.records import cordons, history
from orchestrator.records.machines import machine_of


def examine(
    arguments: LaunchArguments, *, full: bool, hints: bool, as_json: bool, color: bool | None
) -> int:
    began = time.monotonic()
    request = resolve(arguments)
    diagnosis = diagnose(*expect_code(request, try_all(request)), full=full)
    diagnosis = replace(diagnosis, seconds=time.monotonic() - began)
    if as_json:
        output.tell(json.dumps(report.to_json(diagnosis), indent=1))
    else:
        output.tell(report.to_text(diagnosis, output.terminal(color), hints=hints))
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE


# -- history ------------------------------------------------------------------------------------
# `orchestrator doctor --history`: what each machine did wrong in earlier jobs.

SHOWN = 5  # incidents of one machine, the newest; --json has all


def show(node_list: Path, *, as_json: bool) -> int:
    """Show the machines of the list, and all others of which something is remembered."""
    listed = [machine_of(node) for node in read_nodes(node_list)] if node_list.exists() else []
    known = history.by_machine(history.read(), listed)
    cordoned = cordons.read()
    if as_json:
        machines = [
            {
                "machine": machine,
                "cordoned": cordoned[machine].words if machine in cordoned else None,
                "incidents": [without_machine(incident) for incident in incidents],
            }
            for machine, incidents in known.items()
        ]
        output.tell(json.dumps({"machines": machines}, indent=1))
        return EXIT_DONE
    for machine, incidents in known.items():
        kinds = Counter(incident.kind for incident in incidents)
        counts = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())
        state = f" (cordoned: {cordoned[machine].words})" if machine in cordoned else ""
        output.tell(output.printable(f"{machine}{state}: {counts or 'nothing remembered'}"))
        rows: list[list[Cell]] = [
            [when(incident), incident.experiment, incident.kind, incident.what]
            for incident in incidents[-SHOWN:]
        ]
        if len(incidents) > SHOWN:
            output.tell(f"  {len(incidents) - SHOWN} before these: --json has them")
        if rows:
            output.tell(output.table(rows, output.terminal(), indent=2))
    if not known:
        output.tell("no machine has failed or been slow in a job of this login")
    return EXIT_DONE


def when(incident: history.Incident) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(incident.time))


def without_machine(incident: history.Incident) -> dict[str, object]:
    return {name: value for name, value in asdict(incident).items() if name != "machine"}
