"""Brings the nodes of a job together again: open channels to all, and nothing of it alive there."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from orchestrator.common import interrupt
from orchestrator.common.errors import NodeError, OrchestratorError, StoppedEarly
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.restarts import Restarts
from orchestrator.head.screen.output import say
from orchestrator.head.start.claims import claims
from orchestrator.head.start.recovery.candidates import Candidate, Choice, choose
from orchestrator.protocol.message import Message
from orchestrator.protocol.requests.follow import Living, LivingRuns, Stop
from orchestrator.protocol.timing import HEAD_PATIENCE_SECONDS, SWEEP_PATIENCE_SECONDS
from orchestrator.records import cordons
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

PROOF_SECONDS = 3 * SWEEP_PATIENCE_SECONDS
RETRY_SECONDS = 1.0  # between two tries to reach a node that is away
RETURN_SECONDS = 3.0  # for nodes that an earlier attempt lost, where the job has too few
AWAY_SECONDS = 3.0  # before another takes the place of a node that was there a moment ago
NOTHING_LEFT = "has lost its part of the job, as with another disk"

A = TypeVar("A", bound=Message)


class NotBack(NodeError):
    """A node that the next attempt needs has not come back in time."""


class Parts(Protocol):
    """Gives a node its part of the job anew: the code, and what it is to run."""

    def renew(self, node: NodeRecord) -> NodeRecord: ...


@dataclass(frozen=True)
class Gathered:
    """The nodes of the next attempt, each with an open channel, in their order."""

    nodes: Sequence[NodeRecord]
    channels: Sequence[NodeChannel]
    spares: Sequence[NodeRecord] = ()


def all_answers(nodes: Sequence[NodeRecord], results: Sequence[A | OrchestratorError]) -> list[A]:
    """Return the answers, or raise one error that names every node that failed."""
    answers = [result for result in results if not isinstance(result, OrchestratorError)]
    if len(answers) == len(results):
        return answers
    failed = {
        node.name: result.what
        for node, result in zip(nodes, results, strict=True)
        if isinstance(result, OrchestratorError)
    }
    raise NodeError("; ".join(f"{name}: {what}" for name, what in failed.items()), names=[*failed])


class Gathering:
    """Opens channels to the nodes of the next attempt; waits for one that is away and needed."""

    def __init__(
        self,
        experiment: Experiment,
        record: JobRecord,
        transport: Transport,
        channels: Mapping[int, NodeChannel],
        parts: Parts | None = None,
    ) -> None:
        self.experiment, self.record, self.transport = experiment, record, transport
        self.parts = parts
        self.open = {
            node.name: channels[node.index] for node in record.nodes if node.index in channels
        }
        self.answers: dict[str, LivingRuns] = {}  # of the nodes that are there, by name
        self.renewed: dict[str, NodeRecord] = {}  # those that were given their part anew
        self.sought = False  # nodes that an earlier attempt lost
        self.unable: dict[str, str] = {}  # and why others could not be, in words after their names

    def run(self) -> Gathered:
        """Return the nodes with open channels; NotBack says which are missing."""
        patience = self.record.launch.node_loss_timeout
        began, said = time.monotonic(), False
        while True:
            refuse_if_stopped(self.experiment)
            waited = time.monotonic() - began
            choice, away = self.choose(waited)
            log.debug("after %.1f s: %s; away: %s", waited, choice.problem or choice.nodes, away)
            if not choice.problem:
                if not (self.renew(choice.nodes) and self.hold(choice.nodes)):
                    continue  # another may take the place
                waits = self.needs_time(choice.nodes)
                if not waits or waited > patience:
                    for line in choice.words:
                        say(line)
                    return self.gathered(choice.nodes)
            else:
                if waited > patience:
                    raise NotBack(f"{choice.problem}, after {patience:.0f} s", choice.fix)
                waits = f"waiting for {', '.join(away)} to come back" if away else ""
            self.unable.clear()  # a node may be on its way up
            if waits and not said:
                said = True
                say(f"{waits}, for {patience:.0f} s at most")
            time.sleep(RETRY_SECONDS)

    @property
    def known(self) -> dict[str, NodeRecord]:
        """Return all nodes of the job by name, each with the part that it has now."""
        nodes = {node.name: node for node in (*self.record.nodes, *self.record.spares)}
        return nodes | self.renewed

    def channel_to(self, node: NodeRecord) -> NodeChannel:
        if node.name not in self.open:
            self.open[node.name] = self.reach(node)
        return self.open[node.name]

    def choose(self, waited: float) -> tuple[Choice, list[str]]:
        """Choose among the nodes that answer, and say who is away.

        A lost node is looked for only where no other can take its place: to find out that it is
        still gone takes as long as a connection may.
        """
        record = self.record
        least, most = Restarts(record).bounds
        others = bool(record.spares) or least < len(record.nodes)
        problems: dict[str, str] = {}

        def visit(nodes: Sequence[NodeRecord], *, lost: bool) -> None:
            nodes = [node for node in nodes if lost or node.state != "lost"]
            for node, result in zip(nodes, fleet.everywhere(nodes, self.examine), strict=True):
                if isinstance(result, OrchestratorError):
                    problems[node.name] = f"cannot be reached: {result.what}"
                else:
                    problems[node.name] = "" if result.has_part or self.parts else NOTHING_LEFT
                    self.answers[node.name] = result

        visit(record.nodes, lost=not others)
        ours = self.candidates(problems)[: len(record.nodes)]
        if others and (len(ours) < most or not all(one.fit and not one.suspect for one in ours)):
            visit(record.spares, lost=False)
        absent = [node.name for node in record.nodes if problems.get(node.name, "is lost")]
        fleeting = [
            name for name in absent if problems.get(name, NOTHING_LEFT) != NOTHING_LEFT
        ]  # nobody has said that it is lost
        gone = [node for node in record.spares if node.state == "lost"]
        if len(record.nodes) < most and gone and not self.sought:
            self.sought = True
            back = fleet.start(partial(visit, gone, lost=True))
            back.join(RETURN_SECONDS)
        choice = choose(self.candidates(problems), least, most)
        suspects = {one.name for one in self.candidates(problems) if one.suspect}
        if others and (choice.problem or suspects & {*choice.nodes}):
            visit([*record.nodes, *record.spares], lost=True)
            choice = choose(self.candidates(problems), least, most)
        if fleeting and waited < AWAY_SECONDS and not choice.problem:
            return replace(choice, problem="a node may come back"), absent
        return choice, absent

    def candidates(self, problems: Mapping[str, str]) -> list[Candidate]:
        """Describe the nodes of the last attempt, and then those that stand by."""
        restarts, cordoned = Restarts(self.record), cordons.read()
        known = [(node, place) for place, node in enumerate(self.record.nodes)]
        standing = [(node, None) for node in self.record.spares]
        return [
            Candidate(
                name=node.name,
                place=place,
                problem=self.unable.get(node.name, problems.get(node.name, "is lost")),
                failures=restarts.blamed(node.name),
                cordoned=cordons.words_of(node, cordoned),
                rests=self.rests(node, restarts),
                unable=bool(restarts.unable(node)),
            )
            for node, place in [*known, *standing]
        ]

    def rests(self, node: NodeRecord, restarts: Restarts) -> str:
        """Say why a node is used only where there is no other, in words after its name."""
        words = ["" if self.has_part(node) else NOTHING_LEFT]
        words.append(restarts.unable(node))
        answer = self.answers.get(node.name)
        words.append(doubt(answer.doubtful) if answer is not None else "")
        return next(filter(None, words), "")

    def needs_time(self, names: Sequence[str]) -> str:
        """Say what may mend itself of what speaks against nodes that have to be used."""
        restarts = Restarts(self.record)
        known = [node for name, node in self.known.items() if name in names]
        unable = [f"{node.name} {words}" for node in known if (words := restarts.unable(node))]
        return f"{'; '.join(unable)}, and there is no other node: waiting" if unable else ""

    def renew(self, names: Sequence[str]) -> bool:
        """Give nodes that have lost their part another one; return False if one cannot have it."""
        for name in names:
            if self.parts is None or self.has_part(self.known[name]):
                continue
            log.info("%s: is given its part of the job again", name)
            try:
                self.renewed[name] = self.parts.renew(self.known[name])
            except OrchestratorError as error:
                self.unable[name] = f"cannot be given its part of the job again: {error.what}"
                self.unable[name] += f" ({error.fix})" if error.fix else ""
                return False
        return True

    def hold(self, names: Sequence[str]) -> bool:
        """Hold the GPUs of these nodes again; return False if others have taken some."""
        if self.record.launch.claim == "none" or self.record.head_elsewhere:
            return True

        wanted = [
            claims.NodeClaim(name, self.open[name], part=self.record.first_part(self.known[name]))
            for name in names
        ]
        try:
            missing = claims.hold(wanted).missing
        except NodeError as error:
            missing = dict.fromkeys(error.names, error.what)
        self.unable.update(
            (name, f"cannot hold the job's GPUs: {why}") for name, why in missing.items()
        )
        return not missing

    def has_part(self, node: NodeRecord) -> bool:
        answer = self.answers.get(node.name)
        return answer is None or answer.has_part

    def gathered(self, names: Sequence[str]) -> Gathered:
        """Number the nodes anew, each with what it has of the attempt that it began with."""
        first = self.record.attempts[0].job
        before = {
            name: node if node.first_job else replace(node, first_job=first, first_node=node.index)
            for name, node in self.known.items()
        }
        nodes, ranks = list[NodeRecord](), 0
        for index, name in enumerate(names):
            node = before[name]  # it is there, also if it was lost before
            nodes.append(replace(node, index=index, first_rank=ranks, state="starting"))
            ranks += before[name].nproc
        for name in set(self.open) - set(names):
            self.open.pop(name).connection.close()
        spares = [node for name, node in before.items() if name not in names]
        gathered = Gathered(nodes, [self.open[name] for name in names], spares)
        self.end_what_lives(gathered)
        return gathered

    def examine(self, node: NodeRecord) -> LivingRuns:
        """Ask a node what of the job lives there, and whether it still has its part of it."""
        part = self.record.first_part(self.known[node.name])
        question = Living(runs=tuple(parts_of(self.record, node.name)), part=part)
        channel = self.open.get(node.name)
        if channel is not None:  # it hears from us by that
            try:
                return channel.ask(question, HEAD_PATIENCE_SECONDS)
            except NodeError:
                channel.connection.close()
                del self.open[node.name]
        return self.channel_to(node).ask(question, PROOF_SECONDS)

    def reach(self, node: NodeRecord) -> NodeChannel:
        return serving(self.transport, node)

    def end_what_lives(self, gathered: Gathered) -> None:
        """See that nothing of the attempts so far lives on these nodes; end what does."""
        for node, channel in zip(gathered.nodes, gathered.channels, strict=True):
            for job, index in self.answers[node.name].living:
                reason, wait = "the job is started again", SWEEP_PATIENCE_SECONDS
                log.info("%s: ends what still lives of %s", node.name, job)
                order = Stop(job=job, node=index, why=reason, grace=0, wait=wait, for_good=False)
                receipt = channel.ask(order, PROOF_SECONDS)
                if receipt.left:
                    left = f"processes {list(receipt.left)} of {job} do not end"
                    raise NodeError(f"{node.name}: {left}", names=[node.name])


def doubt(processes: Mapping[int, str]) -> str:
    """Say what may still hold GPUs, ports and files of a node, in words after its name."""
    if not processes:
        return ""
    names = ", ".join(f"{pid} ({name})" for pid, name in processes.items())
    return f"may still run processes of an earlier attempt, which is not certain: {names}"


def refuse_if_stopped(experiment: Experiment) -> None:
    """Raise StoppedEarly if the user has asked for the end while nothing ran."""
    if interrupt.end_is_wanted() or experiment.restarts_are_forbidden:
        raise StoppedEarly("stopped by the user")


def parts_of(record: JobRecord, name: str) -> Iterator[tuple[str, int]]:
    """Yield the parts that a node had in the attempts so far."""
    for attempt in record.attempts:
        for index, node in enumerate(attempt.nodes):
            if node == name:
                yield attempt.job, index
