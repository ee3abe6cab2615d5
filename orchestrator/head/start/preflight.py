"""Check that the nodes are fit for a job, before each start and for the doctor."""

from __future__ import annotations

from functools import partial

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.config.schema import Config
from orchestrator.head.connect import fleet
from orchestrator.head.doctor import examination, report
from orchestrator.head.doctor.examination import Diagnosis
from orchestrator.head.doctor.findings import WARN, Examined, Needs
from orchestrator.head.plan import nccl_transport, plan
from orchestrator.head.plan.plan import DEFAULT_PORT, ENGINE
from orchestrator.head.start.nodes import Nodes
from orchestrator.head.start.request import Request
from orchestrator.records import cordons

IN_THE_PLAN = ("port",)  # what the notes of the plan say anyhow


def check(request: Request, nodes: Nodes, say: Say) -> None:
    """Raise an error with all findings if one of them would make the job fail or mislead."""
    thoroughness = request.config.launch.check
    if thoroughness == "none":
        return
    diagnosis = diagnose(request, nodes, full=thoroughness == "full")
    if diagnosis.bad:
        raise CheckFailed(
            f"the nodes are not fit; nothing was started\n\n{report.to_text(diagnosis)}",
            "fix it, or skip this check with --no-check",
        )
    for finding in diagnosis.findings:
        if finding.level == WARN and finding.check not in (*examination.OF_OTHERS, *IN_THE_PLAN):
            say(f"warning: {finding.what}" + (f" -> {finding.fix}" if finding.fix else ""))


def diagnose(request: Request, nodes: Nodes, *, full: bool) -> Diagnosis:
    """Examine the nodes that were reached, and name the others."""
    launch, kind = request.config.launch, request.target.kind
    needs = Needs(
        port=launch.master_port or DEFAULT_PORT,
        that_port=launch.master_port is not None,
        script=request.target.name if kind == "auto" else "",
        torch=kind != "program",
        engine=kind == "engine",
        workdir=kind != "engine" or launch.workdir is not None,
        nproc=launch.nproc,
        refused=refused(request, nodes),
        step=step_of(request, len([node for node in nodes.reached if not node.node.spare])),
    )
    lost = [Examined(node.name, error=error.what, fix=error.fix) for node, error in nodes.lost]
    ask = partial(fleet.ask, nodes.reached)
    known = cordons.read()
    listed = [*(node.node for node in nodes.reached), *(node for node, _ in nodes.lost)]
    cordoned = {node.name: why for node in listed if (why := cordons.words_of(node, known))}
    return examination.diagnose(nodes.probed, lost, needs, ask if full else None, cordoned)


def step_of(request: Request, nodes: int) -> tuple[float, str]:
    """Return the bytes that each node sends to the others in a step, and for what."""
    engine = request.target.name == ENGINE
    known = nccl_transport.parameters(request.config.model) if engine else None
    count = known or nccl_transport.TYPICAL
    config = request.config if engine else Config()
    sent = nccl_transport.bytes_per_step(config, max(nodes, 1), count)
    example = f"{count / 1e6:.3g} million parameters"
    return sent, f"synchronizing {example if known else 'a model of ' + example}"


def refused(request: Request, nodes: Nodes) -> tuple[str, str] | None:
    """Return what the built-in engine could not do on these nodes, and how to fix that."""
    probed = [node.probed for node in nodes.reached if not node.node.spare]
    if request.target.name != ENGINE or nodes.lost:
        return None
    counts = [plan.count_ranks(node, request.config.launch.nproc)[0] for node in probed]
    try:
        plan.check_engine(request.config, counts, probed)
    except CheckFailed as error:
        return error.what, error.fix
    return None
