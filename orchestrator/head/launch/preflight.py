"""Check that the nodes are fit for a job, before each start and for the doctor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestrator.errors import CheckFailed
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.doctor import examination
from orchestrator.head.doctor.examination import Diagnosis
from orchestrator.head.doctor.findings import WARN, Examined
from orchestrator.head.doctor.report import to_text
from orchestrator.head.launch.request import Request
from orchestrator.head.plan.plan import DEFAULT_PORT


def check(request: Request, reached: Sequence[Reached], say: Callable[[str], None]) -> None:
    """Raise an error with all findings if one of them would make the job fail or mislead."""
    how = request.config.launch.check
    if how == "none":
        return
    found = diagnose(request, reached, [], full=how == "full")
    if found.bad:
        raise CheckFailed(
            f"the nodes are not fit; nothing was started\n\n{to_text(found)}",
            "fix it, or skip this check with --no-check",
        )
    for one in found.findings:
        if one.level == WARN and one.check not in examination.OF_OTHERS:
            say(f"warning: {one.what}" + (f" -> {one.fix}" if one.fix else ""))


def diagnose(
    request: Request, reached: Sequence[Reached], others: Sequence[Examined], *, full: bool
) -> Diagnosis:
    """Examine the nodes that were reached; `others` were not, and say why."""
    began = time.monotonic()
    launch, kind = request.config.launch, request.target.kind
    case = examination.examine(
        [*(Examined(one.node.name) for one in reached), *others],
        reached,
        full=full,
        port=(launch.master_port or DEFAULT_PORT, launch.master_port is not None),
        script=request.target.name if kind == "auto" else "",
        torch_needed=kind != "program",
    )
    return examination.judge(case, began)
