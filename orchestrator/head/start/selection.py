"""Check which nodes are fit for a job and choose among them; a spare replaces an unfit node.

The doctor and the check before each start use the same examination.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.doctor import examination
from orchestrator.head.doctor.examination import Diagnosis
from orchestrator.head.doctor.findings import BAD, WARN, Examined, Needs
from orchestrator.head.plan import nccl_transport
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.screen.styles import WARNING, styled
from orchestrator.head.start import claims, gather
from orchestrator.head.start.claims import Hold, NodeClaim, Occupied, wish_of
from orchestrator.head.start.gather import Candidate
from orchestrator.head.start.nodes import Bounds, Nodes, with_master
from orchestrator.head.start.request import LaunchRequest
from orchestrator.node.machine.disks import disk
from orchestrator.records import cordons

log = logging.getLogger(__name__)

# The notes of the plan contain the findings of these checks.
IN_THE_PLAN = ("port",)
# Findings of these checks would be the same on another node.
OF_THE_JOB = ("port", "names")


def choose(request: LaunchRequest, nodes: Nodes, *, hold: bool) -> Nodes:
    """Return `nodes` with the chosen ones in `reached` and those that stand by in `spares`.

    With `hold` the job's GPUs are held, and connections to the nodes left over are closed.
    """
    bounds = nodes.bounds
    if bounds is None:
        return nodes
    unfit, held, chosen = fit_for(request, nodes, bounds, hold)
    names = {node.node.name for node in chosen}
    standing_by = [n for n in nodes.reached if n.node.name not in {*names, *unfit}]
    log.info("chosen of %d nodes: %s", len(nodes.reached), [one.node.name for one in chosen])
    log.info("not chosen: %s", [one.node.name for one in standing_by])
    bad_spares = problems(request, nodes, standing_by)
    spares = [node for node in standing_by if node.node.name not in bad_spares]
    cordoned = {node.name: f"it is cordoned ({c.words})" for node, c in bounds.passed_over}
    lost = {node.name: error.what for node, error in nodes.lost}
    skipped = {**cordoned, **lost, **unfit}
    instead = [node.node.name for node in chosen if node.node.spare]
    notes = [f"{name} is skipped: {reason}" for name, reason in skipped.items()]
    notes += [f"{name} (spare) takes its place" for name in instead]
    notes += held.notes
    notes += [f"{name} cannot be a spare: {reason}" for name, reason in bad_spares.items()]
    if chosen[0].node.name != nodes.master:
        chosen = with_master(request, nodes, chosen)
    if hold:
        # Closing the connection removes the queue entry on a node that the job does not use.
        kept = {node.node.name for node in (*chosen, *spares)}
        for node in nodes.reached:
            if node.node.name not in kept:
                node.channel.connection.close()
    return replace(
        nodes,
        reached=tuple(marked(node, spare=False) for node in chosen),
        spares=tuple(marked(node, spare=True) for node in spares),
        lost=(),
        bounds=None,
        notes=(*nodes.notes, *notes),
    )


def fit_for(
    request: LaunchRequest, nodes: Nodes, bounds: Bounds, hold: bool
) -> tuple[dict[str, str], Hold, list[Reached]]:
    """Return the unfit nodes with reasons, the claims that are held, and the chosen nodes.

    If too few nodes are fit, the first ones are chosen as they are: the check before the start
    names what is wrong. If GPUs are taken by others, Occupied is raised instead.
    """
    known = {node.node.name: node for node in nodes.reached}
    unfit: dict[str, str] = {}
    taken: dict[str, str] = {}
    while True:
        all_nodes = [Candidate(name, problem=unfit.get(name, "")) for name in known]
        choice = gather.choose(all_nodes, bounds.least, bounds.most)
        if choice.problem and taken:
            raise Occupied(taken, bounds.least)
        if choice.problem:
            return {}, Hold(), list(nodes.reached[: bounds.most])
        chosen = [known[name] for name in choice.nodes]
        bad, held = problems(request, nodes, chosen), Hold()
        if not bad and hold:
            wanted = [
                NodeClaim(node.node.name, node.channel, wish)
                for node in chosen
                if (wish := wish_of(request, node)) and wish.needed
            ]
            held = claims.hold(wanted)
            taken.update(held.missing)
        if not bad and not held.missing:
            return unfit, held, chosen
        log.info("not for this job: %s", {**bad, **held.missing})
        unfit.update({**bad, **held.missing})


def problems(request: LaunchRequest, nodes: Nodes, some: Sequence[Reached]) -> dict[str, str]:
    """Return the reasons by name of the nodes that the quick check refuses."""
    if request.config.launch.check == "none" or not some:
        return {}
    diagnosis = diagnose(request, replace(nodes, reached=tuple(some), lost=()), full=False)
    bad: dict[str, str] = {}
    for finding in diagnosis.findings:
        if finding.level == BAD and finding.check not in OF_THE_JOB:
            for name in finding.nodes:
                bad.setdefault(name, finding.what.removeprefix(f"{name}: "))
    return bad


def marked(node: Reached, *, spare: bool) -> Reached:
    return replace(node, node=replace(node.node, spare=spare))


# -- fit or not -------------------------------------------------------------------------------


def check(request: LaunchRequest, nodes: Nodes) -> None:
    """Raise with all findings if one of them would make the job fail or its results wrong."""
    thoroughness = request.config.launch.check
    if thoroughness == "none":
        return
    log.info("checks %d nodes", len(nodes.reached))
    with ProgressBar("checking"):
        diagnosis = diagnose(request, nodes, full=thoroughness == "full")
    if diagnosis.bad:
        raise CheckFailed(
            f"the nodes are not fit; nothing was started\n\n{examination.to_text(diagnosis)}",
            "fix it, or skip this check with --check none",
            about="\n".join(f.what for f in diagnosis.findings if f.level == BAD),
        )
    for finding in diagnosis.findings:
        if finding.level == WARN and finding.check not in (*examination.OF_OTHERS, *IN_THE_PLAN):
            mark = styled("warning:", WARNING)
            say(f"{mark} {finding.what}" + (f" -> {finding.fix}" if finding.fix else ""))


def diagnose(request: LaunchRequest, nodes: Nodes, *, full: bool) -> Diagnosis:
    """Return the diagnosis of the reached nodes, with an entry for each lost one."""
    launch, kind = request.config.launch, request.target.kind
    needs = Needs(
        port=launch.master_port or DEFAULT_PORT,
        that_port=launch.master_port is not None,
        script=request.target.name if kind == "auto" else "",
        torch=kind != "program",
        engine=kind == "engine",
        workdir=kind != "engine" or launch.workdir is not None,
        nproc=launch.nproc,
        fabric=fabric_of(request, nodes),
    )
    lost = [Examined(node.name, error=error.what, fix=error.fix) for node, error in nodes.lost]
    ask = partial(fleet.ask, nodes.reached)
    known = cordons.read()
    listed = [*(node.node for node in nodes.reached), *(node for node, _ in nodes.lost)]
    cordoned = {node.name: reason for node in listed if (reason := cordons.words_of(node, known))}
    head = disk(str(request.where.experiments))
    return examination.diagnose(nodes.probed, lost, needs, ask if full else None, cordoned, head)


def fabric_of(request: LaunchRequest, nodes: Nodes) -> str:
    """Return the kind of NCCL transport between these nodes, "" if no plan is possible."""
    probed = [node.probed for node in nodes.reached if not node.node.spare]
    if not probed:
        return ""
    config = request.config
    theirs = frozenset({*config.nccl.variables, *config.env, *(s.name for s in request.env)})
    try:
        chosen = nccl_transport.choose(probed, config.nccl.profile, theirs, frozenset())
    except CheckFailed:
        # The plan raises the same error later.
        return ""
    return chosen.kind
