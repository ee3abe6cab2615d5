"""Find the state that a job will resume from, and see that its own nodes have all of it.

Nodes that share no disk keep parts each. Those of the job bring each other what they need; what
only others have, which were in an earlier job or an earlier attempt, is brought from there first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.text import Say, duration, plural, size
from orchestrator.head.chores.pull import LIST_SECONDS
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import serving
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.facts import listed
from orchestrator.head.resume.beats import Beats
from orchestrator.head.resume.bring import Bringing, Stopped
from orchestrator.head.resume.holder import Holder
from orchestrator.protocol.requests.transfer import Checkpoints
from orchestrator.records import checkpoint_parts
from orchestrator.records.checkpoint_parts import Candidate, Holding

LATE_SECONDS = 10.0  # after which it is said who has not answered


class Search:
    """The nodes of the job that is about to start, and others that may have parts of its state."""

    def __init__(
        self,
        own: Sequence[Holder],
        transport: Transport,
        say: Say,
        stopped: Stopped,
        place: Path,  # here, for what nodes cannot take from each other
    ) -> None:
        self.place = place
        self.own, self.transport, self.say, self.stopped = list(own), transport, say, stopped
        self.others: dict[str, Holder | OrchestratorError] = {}  # by their names: reached once
        self.beats = Beats()  # old nodes may take minutes to answer, or not to
        for holder in self.own:
            self.beats.begin(holder)

    def close(self) -> None:
        for holder in self.others.values():
            if isinstance(holder, Holder):
                holder.open.connection.close()
        self.beats.end()

    def held(
        self, holders: Sequence[Holder], question: Checkpoints, first: int = 0
    ) -> list[Holding]:
        """Return what these nodes have, who are numbered from `first` on."""
        silent = {holder.name for holder in holders}

        def look(pair: tuple[int, Holder]) -> list[Holding]:
            try:
                return pair[1].look(question, pair[0])
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
            answers = fleet.everywhere(list(enumerate(holders, first)), look)
        finally:
            late.cancel()
        return [
            holding
            for answer in answers
            if not isinstance(answer, OrchestratorError)  # who has nothing to say has nothing
            for holding in answer
        ]

    def reach(self, others: Sequence[Holder]) -> list[Holder]:
        """Connect to other nodes, all at once; return those that are there."""

        def connect(holder: Holder) -> Holder:
            holder.channel = serving(self.transport, holder.login)
            return holder

        new = [holder for holder in others if holder.name not in self.others]
        for holder, result in zip(new, fleet.everywhere(new, connect), strict=True):
            self.others[holder.name] = result
            if isinstance(result, Holder):
                self.beats.begin(result)
        known = [self.others[holder.name] for holder in others]
        return [each for each in known if isinstance(each, Holder)]

    def away(self, others: Sequence[Holder]) -> str:
        """Name those that could not be reached, and why; nothing if there are none."""
        lines = [
            f"{holder.name} cannot be reached ({error.what})"
            for holder in others
            if isinstance(error := self.others.get(holder.name), OrchestratorError)
        ]
        return listed(lines)

    def bring(
        self,
        question: Checkpoints,
        others: Sequence[Holder],
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
        holders = [*self.own, *there]
        found = checkpoint_parts.candidates([*held, *self.held(there, question, len(self.own))])
        away = self.away(others)
        if away:
            self.say(f"{away}: what is kept there alone is not brought")
        own = range(len(self.own))
        for at, candidate in enumerate(found):
            if candidate.on(own).whole:
                self.say_which(candidate, at)
                return True
            if not candidate.whole:
                self.say(f"WARNING: {candidate.shortage()}")
                continue
            try:
                self.bring_one(candidate, holders, into)
            except NodeError as error:
                self.stopped()
                self.say(f"WARNING: step {candidate.step} could not be brought: {error}")
                found[at] = candidate.on(own)
                continue
            self.say_which(candidate, at)
            return True
        if found:
            raise nothing_whole(found, away)
        return False

    def say_which(self, candidate: Candidate, at: int) -> None:
        if at:
            self.say(f"the newest whole checkpoint is that of step {candidate.step}")

    def bring_one(self, candidate: Candidate, holders: Sequence[Holder], into: str) -> None:
        """Bring what the job's nodes lack of one checkpoint."""
        began = time.monotonic()
        deliveries = checkpoint_parts.to_bring(candidate, range(len(self.own)))
        version = candidate.versions[deliveries[0].manifest]
        bringing = Bringing(holders, deliveries, candidate.step, version, self.place)
        bringing.go(into, self.stopped)
        for line in bringing.through_here[:1]:
            more = len(bringing.through_here) - 1
            others = f"; nor can {plural(more, 'other')}" if more else ""
            self.say(f"{line}{others}: the files came through this machine")
        count, total = len(deliveries), sum(each.record.size for each in deliveries)
        sources = [holders[number].name for number in sorted({d.source for d in deliveries})]
        targets = [holders[number].name for number in sorted({d.target for d in deliveries})]
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


def others_than(own: Sequence[Holder], holders: Sequence[Holder]) -> list[Holder]:
    """Leave out who is among the job's own nodes, by its login or by its address; each once."""
    logins = {login_of(holder) for holder in own}
    places = {place for holder in own for place in (holder.address, holder.open.connection.address)}
    kept: dict[str, Holder] = {}
    for holder in holders:
        if login_of(holder) not in logins and holder.address not in places - {""}:
            kept.setdefault(holder.name, replace(holder))
    return list(kept.values())


def login_of(holder: Holder) -> tuple[str, str | None, int | None]:
    return holder.login.host, holder.login.user, holder.login.port
