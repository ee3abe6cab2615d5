"""Choose the nodes of a job from those that were reached: in the place of an unfit one, a spare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.connect.reach import Reached
from orchestrator.head.doctor.findings import BAD
from orchestrator.head.start import preflight
from orchestrator.head.start.nodes import Bounds, Nodes, with_master
from orchestrator.head.start.request import Request

OF_THE_JOB = ("port", "config", "names")  # findings that another node would not change


def choose(request: Request, nodes: Nodes) -> Nodes:
    """Leave the nodes of the job in `reached`, and those that stand by in `spares`."""
    bounds = nodes.bounds
    if bounds is None:
        return nodes
    unfit = unfit_of(request, nodes, bounds)
    pool = [node for node in nodes.reached if node.node.name not in unfit]
    chosen, standing_by = pool[: bounds.most], pool[bounds.most :]
    bad_spares = problems(request, nodes, standing_by)
    spares = [node for node in standing_by if node.node.name not in bad_spares]
    notes = [*passed_over(nodes, bounds, unfit), *stand_in(nodes, chosen)]
    notes += [f"{name} cannot be a spare: {why}" for name, why in bad_spares.items()]
    if chosen[0].node.name != nodes.master:
        chosen = with_master(request, nodes, chosen)
    return replace(
        nodes,
        reached=tuple(marked(node, spare=False) for node in chosen),
        spares=tuple(marked(node, spare=True) for node in spares),
        lost=(),
        bounds=None,
        notes=(*nodes.notes, *notes),
    )


def unfit_of(request: Request, nodes: Nodes, bounds: Bounds) -> dict[str, str]:
    """Return the nodes that others can replace, and why they should be.

    None, where there are too few others: the check before the start names what is wrong then.
    """
    unfit: dict[str, str] = {}
    while True:
        pool = [node for node in nodes.reached if node.node.name not in unfit]
        if len(pool) < bounds.least:
            return {}
        bad = problems(request, nodes, pool[: bounds.most])
        if not bad:
            return unfit
        unfit.update(bad)


def problems(request: Request, nodes: Nodes, some: Sequence[Reached]) -> dict[str, str]:
    """Return those of these nodes that the quick check refuses, and why."""
    if request.config.launch.check == "none" or not some:
        return {}
    diagnosis = preflight.diagnose(
        request, replace(nodes, reached=tuple(some), lost=()), full=False
    )
    bad: dict[str, str] = {}
    for finding in diagnosis.findings:
        if finding.level == BAD and finding.check not in OF_THE_JOB:
            for name in finding.nodes:
                bad.setdefault(name, finding.what.removeprefix(f"{name}: "))
    return bad


def passed_over(nodes: Nodes, bounds: Bounds, unfit: dict[str, str]) -> list[str]:
    """Say which nodes the job does not get, and why."""
    why = [
        f"{node.name} is passed over: it is cordoned ({c.words})" for node, c in bounds.passed_over
    ]
    lost: Sequence[tuple[str, OrchestratorError]] = [(n.name, error) for n, error in nodes.lost]
    why += [f"{name} is passed over: {error.what}" for name, error in lost]
    return [*why, *(f"{name} is passed over: {what}" for name, what in unfit.items())]


def stand_in(nodes: Nodes, chosen: Sequence[Reached]) -> list[str]:
    names = ", ".join(node.node.name for node in chosen if node.node.spare)
    if not names:
        return []
    return [f"{names} (spare) {'take their places' if ', ' in names else 'takes its place'}"]


def marked(node: Reached, *, spare: bool) -> Reached:
    return replace(node, node=replace(node.node, spare=spare))
