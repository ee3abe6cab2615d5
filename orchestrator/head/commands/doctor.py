"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.doctor import report
from orchestrator.head.screen import output
from orchestrator.head.start.code import expect_code
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.preflight import diagnose
from orchestrator.head.start.request import resolve


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
        output.tell(report.to_text(diagnosis, output.look(color), hints=hints))
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE
