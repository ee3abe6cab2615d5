"""Choose the nodes of an attempt: of its first one among those that are fit for the job.

The doctor and the check before each start use the same examination.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.doctor import examination
from orchestrator.head.doctor.examination import Diagnosis
from orchestrator.head.doctor.findings import BAD, WARN, Examined, Needs
from orchestrator.head.events import of_launch
from orchestrator.head.plan import nccl_transport
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.start import claims
from orchestrator.head.start.claims import Hold, NodeClaim, Occupied, devices_of
from orchestrator.head.start.nodes import Bounds, Nodes, nodes_with_master
from orchestrator.node.machine.disks import disk_of

log = logging.getLogger(__name__)

# The notes of the plan contain the findings of these checks.
IN_THE_PLAN = ("port",)
# Findings of these checks would be the same on another node.
OF_THE_JOB = ("port", "names")


# -- the choice, of all attempts (pure functions) -------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A node that the next attempt could run on; `problem` and `rests` complete "NAME ..."."""

    name: str
    # The node's index in the last attempt, None if it stood by.
    place: int | None = None
    # The reason why it cannot be used, e.g. "cannot be reached: ...".
    problem: str = ""
    # The reason to use it only if the job could not go on without it.
    rests: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and not self.rests


@dataclass(frozen=True)
class Choice:
    """The nodes of the next attempt in the order of their indices, and the reasons in words."""

    nodes: tuple[str, ...]
    # One line for each change; empty if the nodes stay the same.
    words: tuple[str, ...] = ()
    # The reason why there can be no next attempt; then `nodes` is empty.
    problem: str = ""


def choose_candidates(candidates: Sequence[Candidate], least: int, most: int) -> Choice:
    """Choose `least` to `most` nodes; those of the last attempt come first.

    Candidates without a place are spares, in order of preference. Nodes that stay keep their
    order, and a spare gets the index of the node that it replaces. So the ranks of nodes that stay
    find their shards and in-memory copies where they left them.
    """
    last = {node.place: node for node in candidates if node.place is not None}
    seats = {place: node if node.good else None for place, node in sorted(last.items())}
    for node in candidates:
        if node.good and node.place is None:
            seat_node(node, seats, most)
    resting = [node for node in candidates if node.rests and not node.problem]
    for node in sorted(resting, key=lambda node: node.place is None):
        # A resting node is used only if the job could not go on without it.
        seat_node(node, seats, least)
    nodes = tuple(node.name for _, node in sorted(seats.items()) if node is not None)
    if len(nodes) < max(least, 1):
        missing = [f"{node.name} {node.problem}" for node in candidates if node.problem]
        needs = f"the job needs at least {plural(least, 'node')}, and {len(nodes)} can be used"
        return Choice((), problem=f"{needs}: {'; '.join(missing)}")
    log.info("chosen among %d candidates: %s", len(candidates), nodes)
    return Choice(nodes, tuple(seat_changes(last, seats)))


def seat_node(node: Candidate, seats: dict[int, Candidate | None], most: int) -> None:
    """Assign a node its own index, an empty one or a new one, if fewer than `most` are taken."""
    if sum(taken is not None for taken in seats.values()) >= most:
        return
    empty = [place for place, taken in sorted(seats.items()) if taken is None]
    new = max(seats, default=-1) + 1
    seats[node.place if node.place in empty else next(iter(empty), new)] = node


def seat_changes(
    last: Mapping[int, Candidate], seats: Mapping[int, Candidate | None]
) -> Iterator[str]:
    """Yield a line with the reason for each index that has another node than before."""
    for place, node in sorted(seats.items()):
        before = last.get(place)
        against = f"{before.name} {before.problem or before.rests}" if before else ""
        if before is None and node is not None:
            yield f"{node.name} joins"
        elif node is None:
            yield f"{against}: on without it, as there is no other node"
        elif node is not before:
            yield f"{against}: {node.name} takes its place"
        elif node.rests:
            yield f"{against}; it stays, as there is no other node"
    count = sum(node is not None for node in seats.values())
    if count < len(last):
        yield f"the job continues with {count} of {plural(len(last), 'node')}"


# -- the nodes of the first attempt ---------------------------------------------------------------


def select_nodes(request: LaunchRequest, nodes: Nodes, *, hold: bool) -> Nodes:
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
    bad_spares = node_problems(request, nodes, standing_by)
    spares = [node for node in standing_by if node.node.name not in bad_spares]
    lost = {node.name: error.what for node, error in nodes.lost}
    skipped = {**lost, **unfit}
    instead = [node.node.name for node in chosen if node.node.spare]
    notes = [f"{name} is skipped: {reason}" for name, reason in skipped.items()]
    notes += [f"{name} (spare) takes its place" for name in instead]
    notes += held.notes
    notes += [f"{name} cannot be a spare: {reason}" for name, reason in bad_spares.items()]
    if chosen[0].node.name != nodes.master:
        chosen = nodes_with_master(request, nodes, chosen)
    if hold:
        # Closing the connection removes the queue entry on a node that the job does not use.
        kept = {node.node.name for node in (*chosen, *spares)}
        for node in nodes.reached:
            if node.node.name not in kept:
                node.channel.connection.close()
    return replace(
        nodes,
        reached=tuple(marked_node(node, spare=False) for node in chosen),
        spares=tuple(marked_node(node, spare=True) for node in spares),
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
        choice = choose_candidates(all_nodes, bounds.least, bounds.most)
        if choice.problem and taken:
            raise Occupied(taken, bounds.least)
        if choice.problem:
            return {}, Hold(), list(nodes.reached[: bounds.most])
        chosen = [known[name] for name in choice.nodes]
        bad, held = node_problems(request, nodes, chosen), Hold()
        if not bad and hold:
            wanted = [
                NodeClaim(node.node.name, node.channel, devices)
                for node in chosen
                if (devices := devices_of(request, node)) and devices.needed
            ]
            held = claims.hold_gpus(wanted)
            taken.update(held.missing)
        if not bad and not held.missing:
            return unfit, held, chosen
        log.info("not for this job: %s", {**bad, **held.missing})
        unfit.update({**bad, **held.missing})


def node_problems(request: LaunchRequest, nodes: Nodes, some: Sequence[Reached]) -> dict[str, str]:
    """Return the reasons by name of the nodes that the quick check refuses."""
    if request.config.launch.check == "none" or not some:
        return {}
    diagnosis = diagnose_job(request, replace(nodes, reached=tuple(some), lost=()), full=False)
    bad: dict[str, str] = {}
    for finding in diagnosis.findings:
        if finding.level == BAD and finding.check not in OF_THE_JOB:
            for name in finding.nodes:
                bad.setdefault(name, finding.what.removeprefix(f"{name}: "))
    return bad


def marked_node(node: Reached, *, spare: bool) -> Reached:
    return replace(node, node=replace(node.node, spare=spare))


# -- fit or not -------------------------------------------------------------------------------


def check_nodes(request: LaunchRequest, nodes: Nodes) -> None:
    """Raise with all findings if one of them would make the job fail or its results wrong."""
    thoroughness = request.config.launch.check
    if thoroughness == "none":
        return
    log.info("checks %d nodes", len(nodes.reached))
    with ProgressBar("checking"):
        diagnosis = diagnose_job(request, nodes, full=thoroughness == "full")
    if diagnosis.bad:
        raise CheckFailed(
            "the nodes are not fit; nothing was started\n\n"
            + examination.diagnosis_to_text(diagnosis),
            "fix it, or skip this check with --check none",
            about="\n".join(f.what for f in diagnosis.findings if f.level == BAD),
        )
    for finding in diagnosis.findings:
        if finding.level == WARN and finding.check not in (*examination.OF_OTHERS, *IN_THE_PLAN):
            fix = f" -> {finding.fix}" if finding.fix else ""
            tell(of_launch.CheckWarned(f"{finding.what}{fix}"))


def diagnose_job(request: LaunchRequest, nodes: Nodes, *, full: bool) -> Diagnosis:
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
    ask = partial(fleet.ask_nodes, nodes.reached)
    head = disk_of(str(request.where.experiments))
    return examination.diagnose_nodes(nodes.probed, lost, needs, ask if full else None, head)


def fabric_of(request: LaunchRequest, nodes: Nodes) -> str:
    """Return the kind of NCCL transport between these nodes, "" if no plan is possible."""
    probed = [node.probed for node in nodes.reached if not node.node.spare]
    if not probed:
        return ""
    config = request.config
    theirs = frozenset({*config.nccl.variables, *config.env, *(s.name for s in request.env)})
    try:
        chosen = nccl_transport.choose_fabric(probed, config.nccl.profile, theirs, frozenset())
    except CheckFailed:
        # The plan raises the same error later.
        return ""
    return chosen.kind
