"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from orchestrator.config.launch import LaunchArguments
from orchestrator.errors import EXIT_CHECK, EXIT_DONE, OrchestratorError
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.doctor import report
from orchestrator.head.doctor.findings import Examined
from orchestrator.head.launch import nodes, preflight
from orchestrator.head.launch.request import resolve
from orchestrator.head.screen import output


def examine(
    arguments: LaunchArguments, *, full: bool, hints: bool, as_json: bool, color: bool | None
) -> int:
    began = time.monotonic()
    request = resolve(arguments)
    everybody = nodes.reach_all(request, needed=False)
    reached = [result for result in everybody.results if isinstance(result, Reached)]
    lost = [
        Examined(node.name, error=error.what, fix=error.fix)
        for node, error in zip(everybody.nodes, everybody.results, strict=True)
        if isinstance(error, OrchestratorError)
    ]
    diagnosis = preflight.diagnose(request, reached, lost, full=full)
    diagnosis = replace(diagnosis, seconds=time.monotonic() - began)
    if as_json:
        output.tell(json.dumps(report.to_json(diagnosis), indent=1))
    else:
        look = output.look(color)
        output.tell(report.to_text(diagnosis, look, hints=hints))
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE
