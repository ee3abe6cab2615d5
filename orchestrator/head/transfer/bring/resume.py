"""Find the state that a job goes on from, and see that its own nodes have all of it.

Nodes that share no disk keep parts each. Those of the job bring each other what they need; what
only others have, which were in an earlier job or an earlier attempt, is brought from there first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, UsageError
from orchestrator.common.hosts import listed
from orchestrator.common.text import Say, duration, plural, size
from orchestrator.config.launch import Where
from orchestrator.config.schema import Checkpoint
from orchestrator.head.connect import fleet
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.transfer.bring.checkpoint import Missing, Partner
from orchestrator.head.transfer.bring.saved import bring_saved
from orchestrator.head.transfer.fetch.pull import LIST_SECONDS
from orchestrator.protocol.requests.transfer import Checkpoints
from orchestrator.records import (
    checkpoint_parts,
    experiments,
)
from orchestrator.records.checkpoint_parts import Candidate, Holding
from orchestrator.records.experiment import STAMP, Experiment, JobRecord, NodeRecord

log = logging.getLogger(__name__)

LATE_SECONDS = 10.0  # after which it is said who has not answered


MOST_LOOKED_AT = 8  # earlier experiments: those before them have other states


# -- before a start, and before a later attempt --------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A job that is about to start, and the nodes that it could have had."""

    checkpoint: Checkpoint
    where: Where
    name: str
    own: Sequence[Partner]  # its nodes
    others: Sequence[Partner]  # all nodes of the list


def bring_to_start(start: Start, transport: Transport, say: Say) -> None:
    """Bring what the nodes lack together of the state that the config asks for, as the ranks will.

    CheckFailed where parts of it are known, and none of its states is whole.
    """
    log.info("looks for the state that the job resumes from: %s", start.checkpoint.resume)
    checkpoint = start.checkpoint
    named = checkpoint.resume if checkpoint.resume != "auto" else None
    directory = checkpoint.directory if named is None else named
    known = list(earlier(start, named))[:MOST_LOOKED_AT]
    search = Search(start.own, transport, say, lambda: None)
    try:
        if directory is not None and (named is None or not known):
            # Below the code it is the node's own; and before the first run nobody has anything.
            if directory.startswith(("/", "~/")) and (named is not None or known):
                question = Checkpoints(directory=directory)
                search.bring(question, others_than(start.own, start.others), directory)
            return
        old = [others_than(start.own, all_of(experiment.read_record())) for experiment in known]
        if not any(old):
            return  # all who can have any are nodes of this job: its ranks ask each other
        for experiment, others in zip(known, old, strict=True):
            if search.bring(Checkpoints(experiment=experiment.name), others, ""):
                return
    finally:
        search.close()


def earlier(start: Start, named: str | None) -> Iterator[Experiment]:
    """Yield the experiments whose state may be meant, the newest first; those of our own alone."""
    root, trusted = start.where.experiments, start.where.trust_record
    if named is not None:
        found = [experiments.find(root, named, trusted=trusted)]
    else:
        known = experiments.every(root, trusted=trusted)[::-1]
        found = [each for each in known if STAMP.fullmatch(each.name) and stem(each) == start.name]
    for experiment in found:
        if experiment is None:
            continue
        try:
            record = experiment.read_record()
        except UsageError:
            continue
        if experiment.is_launched_here(record) and not (record.scheduled or record.part_of):
            yield experiment


def stem(experiment: Experiment) -> str:
    return experiment.name[: -len("_YYYYMMDD_HHMMSS")]


def all_of(record: JobRecord) -> list[Partner]:
    """List the nodes of an earlier job, of all of its attempts."""
    before = {name for attempt in record.attempts for name in attempt.nodes}
    spares = [node for node in record.spares if node.name in before]
    return partners_of([*record.nodes, *spares], record)


def partners_of(nodes: Sequence[NodeRecord], record: JobRecord) -> list[Partner]:
    return [
        Partner(node.name, address=node.address, login=node, job=record.first_part(node))
        for node in nodes
    ]


def bring_to_attempt(
    experiment: Experiment,
    record: JobRecord,
    nodes: Sequence[NodeRecord],
    channels: Sequence[NodeChannel],
    spares: Sequence[NodeRecord],
    transport: Transport,
    say: Say,
    stopped: Callable[[], None],
) -> None:
    """Bring to the nodes of the next attempt the newest state, and what a user's program saved.

    `record` has all attempts so far, `spares` are the nodes that this one leaves, and `stopped`
    raises an error when the user has stopped the job. CheckFailed says why it must not begin.
    """
    log.info("brings the newest state to %s", [node.name for node in nodes])
    partners = [
        Partner(node.name, channel, address=node.address, login=node, job=record.first_part(node))
        for node, channel in zip(nodes, channels, strict=True)
    ]
    before = {name for attempt in record.attempts for name in attempt.nodes}
    left = [node for node in spares if node.name in before]
    search = Search(partners, transport, say, stopped)
    try:
        if left and not record.scheduled:
            bring_from_left(experiment, search, partners_of(left, record))
        if record.engine:  # what it saves is brought otherwise
            return
        latest = {name for one in record.latest for name in one.nodes}
        there = [node for node in left if node.name in latest and node.state != "lost"]
        givers = search.reach(others_than(partners, partners_of(there, record)))
        if len(partners) > 1 or givers or record.attempts[-1].nodes != [partners[0].name]:
            bring_saved(experiment, record, partners, givers, say, stopped)
    finally:
        search.close()


def bring_from_left(experiment: Experiment, search: Search, left: Sequence[Partner]) -> None:
    """Bring what only those have that the attempt leaves.

    Without it the ranks take what is whole, and say so. Nodes that share a disk lack nothing.
    """
    question = Checkpoints(experiment=experiment.name)
    try:
        if held := search.held(search.own, question):  # else it saves on a shared disk, or nothing
            search.bring(question, others_than(search.own, left), "", held)
    except CheckFailed as error:
        search.say(f"WARNING: {error.what}")


# -- the search ----------------------------------------------------------------------------------


class Search:
    """The nodes of the job that is about to start, and others that may have parts of its state."""

    def __init__(
        self,
        partners: Sequence[Partner],
        transport: Transport,
        say: Say,
        stopped: Callable[[], None],
    ) -> None:
        self.own, self.transport, self.say, self.stopped = list(partners), transport, say, stopped
        self.others: dict[str, Partner | OrchestratorError] = {}  # by their names: reached once

    def close(self) -> None:
        for partner in self.others.values():
            if isinstance(partner, Partner):
                partner.open.connection.close()

    def held(
        self, partners: Sequence[Partner], question: Checkpoints, first: int = 0
    ) -> list[Holding]:
        """Return what these nodes have, who are numbered from `first` on."""
        silent = {partner.name for partner in partners}

        def list_theirs(pair: tuple[int, Partner]) -> list[Holding]:
            try:
                return pair[1].checkpoints(question, pair[0])
            finally:
                silent.discard(pair[1].name)

        def tell() -> None:
            if who := listed(sorted(silent)):
                self.say(
                    f"waiting for {who} to list their checkpoints, for {LIST_SECONDS:.0f} s at most"
                )

        late = threading.Timer(LATE_SECONDS, tell)
        late.daemon = True
        late.start()
        try:
            answers = fleet.everywhere(list(enumerate(partners, first)), list_theirs)
        finally:
            late.cancel()
        return [
            holding
            for answer in answers
            if not isinstance(answer, OrchestratorError)  # who has nothing to say has nothing
            for holding in answer
        ]

    def reach(self, others: Sequence[Partner]) -> list[Partner]:
        """Connect to other nodes, all at once; return those that are there."""

        def connect(partner: Partner) -> Partner:
            assert partner.login is not None
            partner.channel = serving(self.transport, partner.login)
            return partner

        new = [partner for partner in others if partner.name not in self.others]
        for partner, result in zip(new, fleet.everywhere(new, connect), strict=True):
            self.others[partner.name] = result
        known = [self.others[partner.name] for partner in others]
        return [each for each in known if isinstance(each, Partner)]

    def away(self, others: Sequence[Partner]) -> str:
        """Name those that could not be reached, and why; nothing if there are none."""
        lines = [
            f"{partner.name} cannot be reached ({error.what})"
            for partner in others
            if isinstance(error := self.others.get(partner.name), OrchestratorError)
        ]
        return listed(lines)

    def bring(
        self,
        question: Checkpoints,
        others: Sequence[Partner],
        into: str,
        held: Sequence[Holding] | None = None,
    ) -> bool:
        """See that the job's nodes have the newest state that can be had, together.

        `held` is what these nodes have themselves, if they were asked already.
        Return whether there is any; CheckFailed says what is lacking of all that there are.
        """
        if held is None:
            held = self.held(self.own, question)
        found = checkpoint_parts.candidates(held)
        if found and found[0].whole:
            return True
        if not others:
            return bool(found)
        there = self.reach(others)
        partners = [*self.own, *there]
        found = checkpoint_parts.candidates([*held, *self.held(there, question, len(self.own))])
        away = self.away(others)
        if away:
            self.say(f"{away}: what is kept there alone is not brought")
        indexes = range(len(self.own))
        for at, candidate in enumerate(found):
            if candidate.on(indexes).whole:
                self.say_which(candidate, at)
                return True
            if not candidate.whole:
                self.say(f"WARNING: {candidate.shortage()}")
                continue
            try:
                self.bring_one(candidate, partners, into)
            except NodeError as error:
                self.stopped()
                self.say(f"WARNING: step {candidate.step} could not be brought: {error}")
                found[at] = candidate.on(indexes)
                continue
            self.say_which(candidate, at)
            return True
        if found:
            raise nothing_whole(found, away)
        return False

    def say_which(self, candidate: Candidate, at: int) -> None:
        if at:
            self.say(f"the newest whole checkpoint is that of step {candidate.step}")

    def bring_one(self, candidate: Candidate, partners: Sequence[Partner], into: str) -> None:
        """Bring what the job's nodes lack of one checkpoint."""
        began = time.monotonic()
        deliveries = checkpoint_parts.to_bring(candidate, range(len(self.own)))
        version = candidate.versions[deliveries[0].manifest]
        step, say = candidate.step, self.say
        Missing(partners, deliveries, step, version, into, say, self.stopped).bring()
        count, total = len(deliveries), sum(delivery.record.size for delivery in deliveries)
        sources = [partners[number].name for number in sorted({d.source for d in deliveries})]
        targets = [partners[number].name for number in sorted({d.target for d in deliveries})]
        self.say(
            f"checkpoint of step {candidate.step}: {plural(count, 'file')} ({size(total)}) that"
            f" only {listed(sources)} had brought to {listed(targets)}"
            f" in {duration(time.monotonic() - began)}"
        )


def nothing_whole(found: Sequence[Candidate], away: str) -> CheckFailed:
    """Say why none of the checkpoints can be loaded, and what to type."""
    error = checkpoint_parts.nothing_whole(found)
    if not away:
        return error
    return CheckFailed(f"{error.what}\n    {away}", f"bring these nodes back; or {error.fix}")


def others_than(known: Sequence[Partner], partners: Sequence[Partner]) -> list[Partner]:
    """Leave out who is among the job's own nodes, by its login or by its address; each once."""
    logins = {login_of(partner) for partner in known}
    places = {
        place for partner in known for place in (partner.address, partner.open.connection.address)
    }
    kept: dict[str, Partner] = {}
    for partner in partners:
        if login_of(partner) not in logins and partner.address not in places - {""}:
            kept.setdefault(partner.name, partner)
    return list(kept.values())


def login_of(partner: Partner) -> tuple[str, str | None, int | None]:
    assert partner.login is not None
    return partner.login.host, partner.login.user, partner.login.port
