"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from orchestrator.errors import EXIT_CHECK, EXIT_DONE, OrchestratorError
from orchestrator.head.commands import jobs
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.doctor import report
from orchestrator.head.doctor.findings import Examined
from orchestrator.head.launch import preflight
from orchestrator.head.launch.request import everybody
from orchestrator.head.screen import output


def examine(options: dict[str, Any], *, default_config: str, default_hook: str) -> int:
    began = time.monotonic()
    request = jobs.request_of({**options, "detach": False}, default_config, default_hook)
    _, nodes, results, _ = everybody(request)
    reached = [one for one in results if isinstance(one, Reached)]
    lost = [
        Examined(node.name, error=error.what, fix=error.fix)
        for node, error in zip(nodes, results, strict=True)
        if isinstance(error, OrchestratorError)
    ]
    found = preflight.diagnose(request, reached, lost, full=not options["quick"])
    found = replace(found, seconds=time.monotonic() - began)
    if options["as_json"]:
        output.tell(json.dumps(report.to_json(found), indent=1))
    else:
        look = output.look(options["color"])
        output.tell(report.to_text(found, look, hints=options["hints"]))
    return EXIT_CHECK if found.bad else EXIT_DONE
