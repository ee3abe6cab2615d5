"""Hold the GPUs that a job needs, all of them or none; or queue for them, first come first served.

There is no queue server: each waiting launch has an entry on each of its nodes. Entries are ordered
by time, then by id. The order is the same on all nodes, so the first entry can always go ahead.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.hosts import join_names
from orchestrator.common.text import plural
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import Reached
from orchestrator.head.events import of_launch
from orchestrator.head.nodes.facts import lines_by_node, nodes_by_value
from orchestrator.head.plan.plan import count_ranks, devices_of_launch
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.screen import failures
from orchestrator.head.screen.events import tell
from orchestrator.head.screen.progress import ProgressBar
from orchestrator.head.start.nodes import Nodes
from orchestrator.protocol.requests.claims import (
    STARTING,
    WAITING,
    ClaimEntry,
    DeviceRequest,
    holders_in_words,
)
from orchestrator.protocol.requests.request import Part
from orchestrator.protocol.requests.start import (
    Claim,
    Claimed,
    LockTableState,
    ReadLockTable,
    Unclaim,
    Wait,
)
from orchestrator.protocol.timing import CLAIM_SECONDS, QUICK_ANSWER_SECONDS
from orchestrator.records import experiments

log = logging.getLogger(__name__)


class Occupied(CheckFailed):
    """Other jobs or users have GPUs or slots that the job needs."""

    def __init__(self, missing: Mapping[str, str], least: int) -> None:
        lines = "".join(
            f"\n  {line}"
            for line in failures.failure_lines((name, words, "") for name, words in missing.items())
        )
        super().__init__(
            f"the job needs {plural(least, 'node')}, and what it wants of them is not free; nothing"
            f" was started{lines}",
            "wait for it: --queue; or take a part of each node: --gpus N; or start beside what is"
            " there: --claim none",
        )
        self.missing = missing


@dataclass(frozen=True)
class NodeClaim:
    """The GPUs or slots that a job needs on one node."""

    name: str
    channel: NodeChannel
    devices: DeviceRequest | None = None
    # The part of a restarted job, whose GPU request the node has kept.
    part: Part | None = None


@dataclass(frozen=True)
class Hold:
    """The result of a claim: what is missing per node, or notes if everything is held."""

    # The reason by the node's name.
    missing: Mapping[str, str] = field(default_factory=dict)
    # Lines on which GPUs of each node are held, and on nodes whose use by others is unknown.
    notes: tuple[str, ...] = ()


def hold_gpus(wanted: Sequence[NodeClaim]) -> Hold:
    """Hold the GPUs on all these nodes or on none; return what is missing per node.

    All nodes are asked at once. Launches that collide there all release what they have. Each then
    asks one node after the other, in an order that is the same for all. So one gets everything.
    """
    answers = send_claims(wanted, 0.0)
    # The obstacle may pass in a moment, if the others are launches that are about to start.
    passing = all(
        not one.lacking and all(taken.state == STARTING for taken in one.taken) for one in answers
    )
    if passing and not all(one.held for one in answers):
        release_claims(wanted)
        order = sorted(range(len(wanted)), key=lambda at: answers[at].machine)
        wanted, answers = [wanted[at] for at in order], []
        for one in wanted:
            answers += send_claims([one], CLAIM_SECONDS)
            if not answers[-1].held:
                break
    missing = {
        one.name: answer.lacking or holders_in_words(answer.taken)
        # The last nodes may not have been asked.
        for one, answer in zip(wanted, answers, strict=False)
        if not answer.held
    }
    log.info("claims on %s: %s", [one.name for one in wanted], missing or "held")
    if missing:
        release_claims(wanted)
        return Hold(missing)
    return Hold(notes=tuple(claim_notes([one.name for one in wanted], answers)))


def send_claims(wanted: Sequence[NodeClaim], patience: float) -> list[Claimed]:
    """Send the claims to the nodes; if one does not answer, release the others and raise."""
    claims = [Claim(devices=one.devices, part=one.part, patience=patience) for one in wanted]
    answers = fleet.ask_channels(
        [one.channel for one in wanted], claims, QUICK_ANSWER_SECONDS + patience
    )
    if silent := failures.failed_nodes(wanted, answers):
        release_claims(wanted)
        table = failures.failure_table(silent, len(answers), "; nothing was started")
        raise NodeError(table, names=[one.name for one, _ in silent])
    return [answer for answer in answers if isinstance(answer, Claimed)]


def release_claims(wanted: Sequence[NodeClaim]) -> None:
    """Release the claims on these nodes; a node that does not answer releases its own by itself."""
    requests = [Unclaim()] * len(wanted)
    fleet.ask_channels([one.channel for one in wanted], requests, QUICK_ANSWER_SECONDS)


def claim_notes(names: Sequence[str], answers: Sequence[Claimed]) -> Iterator[str]:
    """Yield a line on each node that gives only some GPUs, or whose use by others is unknown."""
    parts = [answer.words if " of " in answer.words else "" for answer in answers]
    for words, where in nodes_by_value(zip(names, parts, strict=True)).items():
        if words:
            yield f"{words} on {join_names(where)}"
    for why, where in nodes_by_value(
        zip(names, (one.unsure for one in answers), strict=True)
    ).items():
        if why:
            yield f"who else computes on the GPUs of {join_names(where)} is not known: {why}"


def without_claims(request: LaunchRequest) -> LaunchRequest:
    """Return the launch without claims and queue, for nodes that a scheduler allocated to it.

    There the scheduler assigns the GPUs.
    """
    launch = replace(request.config.launch, claim="none", queue=False)
    return replace(request, config=replace(request.config, launch=launch))


def devices_of(request: LaunchRequest, node: Reached) -> DeviceRequest | None:
    """Return the GPU request of a launch on a node; None with --claim none."""
    ranks, _ = count_ranks(node.probed, request.config.launch)
    return devices_of_launch(node.probed, request.config, ranks, request.env)


# -- the order of the queue (pure functions) ----------------------------------------------------


def entries_ahead(mine: ClaimEntry, state: LockTableState) -> list[ClaimEntry]:
    """Return the entries that wait on a node before this one, in queue order."""
    waiting = [one for one in state.entries if one.state == WAITING and one.rank < mine.rank]
    return sorted(waiting, key=lambda one: one.rank)


def why_blocked(mine: ClaimEntry, state: LockTableState) -> str:
    """Return why a launch cannot start on a node yet, "" if it can.

    It overtakes earlier entries only if it leaves enough for all of them.
    """
    left = state.free - state.wants
    if left < 0:
        return f"{state.free} of {state.wants} free"
    for one in entries_ahead(mine, state):
        left -= one.wants
        if left < 0:
            return f"{one.user}'s {one.job} waits before it"
    return ""


def find_obstacles(
    mine: ClaimEntry, states: Mapping[str, LockTableState], least: int
) -> dict[str, str]:
    """Return {} if enough nodes are ready for a launch, else the reason by the others' names."""
    reasons = {name: why for name, state in states.items() if (why := why_blocked(mine, state))}
    return reasons if len(states) - len(reasons) < least else {}


def name_holders(state: LockTableState) -> str:
    """Return a clause that names the jobs which hold the GPUs, "" if enough are free."""
    some = [one for one in state.entries if one.keys]
    if state.free >= state.wants or not some:
        return ""
    who = ", ".join(f"{one.user}'s {one.job}" for one in some)
    return f"; {who} {'has' if len(some) == 1 else 'have'} {'the rest' if state.free else 'them'}"


# The pause between two tries to reach nodes that were lost.
PAUSE_SECONDS = 5.0
# The pause between two looks at the queue.
LOOK_SECONDS = 0.3
# The longest pause before a node looks again for programs on its GPUs.
LONGEST_PAUSE_SECONDS = 5.0

A = TypeVar("A")
T = TypeVar("T")


class Disconnected(NodeError):
    """A waiting launch has lost the connection to a node."""


def wait_for_turn(
    request: LaunchRequest,
    nodes: Nodes,
    reach: Callable[[], tuple[LaunchRequest, Nodes]],
    start: Callable[[LaunchRequest, Nodes], T],
) -> T:
    """Wait for the launch's turn, start the job and return `start`'s result.

    If a node is away for a while, the launch connects again and keeps its place in the queue.
    """
    place, said, pause = QueuePlace(request, nodes), "", LOOK_SECONDS
    with ProgressBar("waiting for its turn"):
        while True:
            try:
                place.look()
                why = place.why_it_waits()
                if not why:
                    return start(place.request, place.nodes)
                pause = LOOK_SECONDS
            except Occupied as error:
                # Another launch was quicker, or a program outside of any job uses the GPUs.
                why = in_queue(error.missing)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except Disconnected as error:
                tell(of_launch.LeftQueue(error.what))
                place = QueuePlace(*reach_again(reach))
                continue
            if why != said:
                tell(of_launch.WaitsInQueue(why))
            said = why
            time.sleep(pause)


def reach_again(reach: Callable[[], tuple[LaunchRequest, Nodes]]) -> tuple[LaunchRequest, Nodes]:
    """Try to reach the nodes until they answer, and return them."""
    while True:
        try:
            return reach()
        except NodeError as error:
            log.info("the nodes are tried again in %g s: %s", PAUSE_SECONDS, error.what)
            time.sleep(PAUSE_SECONDS)


class QueuePlace:
    """A launch's place in the queue: one entry per node, removed when this head disconnects."""

    def __init__(self, request: LaunchRequest, nodes: Nodes) -> None:
        self.request, self.nodes = request, nodes
        self.wanted = [
            NodeClaim(node.node.name, node.channel, devices_of(request, node) or DeviceRequest())
            for node in nodes.reached
        ]
        self.least = nodes.bounds.least if nodes.bounds else len(nodes.reached)
        self.entry = entry_of(request, nodes.reached)
        self.entered = False
        # The last state of each node's queue, by the node's name.
        self.states: dict[str, LockTableState] = {}

    def why_it_waits(self) -> str:
        """Return why the launch cannot start yet, "" if it is its turn."""
        if not self.entered:
            self.enter()
        reasons = find_obstacles(self.entry, self.states, self.least)
        return in_queue(
            {name: why + name_holders(self.states[name]) for name, why in reasons.items()}
        )

    def enter(self) -> None:
        """Add an entry to the queue of all nodes; raise if too few nodes could ever fit the job."""
        states = self.states.values()
        small = [name for name, state in self.states.items() if state.wants > state.total]
        if len(states) - len(small) < self.least:
            state = self.states[small[0]]
            has = f"{small[0]} has {state.total}, and {state.wants} are requested"
            raise CheckFailed(f"this can never start: {has}", "take fewer: --gpus N, --nproc N")
        waits = [Wait(entry=self.entry.replace(wants=one.wants)) for one in states]
        channels = [one.channel for one in self.wanted]
        self.answered(fleet.ask_channels(channels, waits, QUICK_ANSWER_SECONDS))
        log.info("stands in the queue of %s", [*self.states])
        self.entered = True
        self.look()

    def look(self) -> None:
        """Read the queue of every node."""
        questions = [ReadLockTable(devices=one.devices or DeviceRequest()) for one in self.wanted]
        channels = [one.channel for one in self.wanted]
        states = self.answered(fleet.ask_channels(channels, questions, QUICK_ANSWER_SECONDS))
        self.states = {one.name: state for one, state in zip(self.wanted, states, strict=True)}

    def answered(self, answers: Sequence[A | OrchestratorError]) -> list[A]:
        """Return the answers of all nodes; if one is lost, disconnect from all and raise."""
        if lost := failures.failed_nodes(self.wanted, answers):
            for one in self.wanted:
                one.channel.connection.close()
            raise Disconnected(failures.failure_table(lost, len(answers), "; connecting again"))
        return [answer for answer in answers if not isinstance(answer, OrchestratorError)]


def in_queue(reasons: Mapping[str, str]) -> str:
    """Return by node why a launch waits in the queue, "" without a reason."""
    return "; ".join(lines_by_node(reasons.items()))


def entry_of(request: LaunchRequest, reached: Sequence[Reached]) -> ClaimEntry:
    """Return the queue entry of a launch that waits on these nodes."""
    # All launches on these nodes use the clock of the same node, so their order is consistent.
    judge = min(reached, key=lambda node: (node.facts.boot, node.facts.network))
    since = request.begun + judge.facts.clock_offset
    return ClaimEntry(
        id=os.urandom(8).hex(),
        state=WAITING,
        job=request.config.launch.name,
        since=since,
        order=since,
        head=socket.gethostname(),
    )


# The pause between two reads of a record.
RECORD_SECONDS = 2.0


def wait_for_others(request: LaunchRequest) -> None:
    """Return once the experiments of --after are done; refuse the launch if one ended otherwise."""
    for name in request.config.launch.after:
        if not is_done(request, name):
            tell(of_launch.WaitsFor(name))
            with ProgressBar(f"waiting for {name}"):
                while not is_done(request, name):
                    time.sleep(RECORD_SECONDS)


def is_done(request: LaunchRequest, name: str) -> bool:
    experiment = experiments.find_experiment(request.where, name)
    if experiment is None:
        raise experiments.missing_experiment(request.where, name)
    record = experiment.read_record()
    if record.over and record.state != "done":
        fix = "leave out --after, or name a job that is done"
        raise CheckFailed(f"{name} has {record.state}; nothing was started", fix)
    return record.over
