"""`orchestrator doctor`: examine all nodes that can be reached, and name the others."""

from __future__ import annotations

from functools import partial

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.doctor import examination
from orchestrator.head.screen import output
from orchestrator.head.start.code import expect_code
from orchestrator.head.start.nodes import try_all
from orchestrator.head.start.request import resolve
from orchestrator.head.start.selection import diagnose


def examine(arguments: LaunchArguments, *, full: bool, hints: bool) -> int:
    request = resolve(arguments)
    request, nodes = expect_code(request, try_all(request))
    diagnosis = diagnose(request, nodes, full=full)
    words = partial(examination.to_text, diagnosis, hints=hints)
    output.result(examination.to_json(diagnosis), words)
    return EXIT_CHECK if diagnosis.bad else EXIT_DONE
