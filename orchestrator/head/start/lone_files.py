"""Before the next attempt: what the program saved on some of its nodes only comes to the others.

Where nodes share no disk, ranks there would find nothing, and begin anew beside those that go on.
So what cannot be brought ends the attempt before it begins: the trained numbers would be wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.common.text import Say
from orchestrator.config import resolved
from orchestrator.head.resume.beats import Beats
from orchestrator.head.resume.holder import Holder
from orchestrator.head.saved import words
from orchestrator.head.saved.bring import Bringing
from orchestrator.head.saved.decide import Decide, Decision
from orchestrator.head.saved.view import View, look
from orchestrator.head.screen.output import printable
from orchestrator.head.start.recovery.gather import Gathered
from orchestrator.records.experiment import Experiment, JobRecord

LAG_SECONDS = 70.0  # NFS keeps attributes for 60 s at most, unless it is told otherwise
LOOK_SECONDS = 1.0
MOST_BYTES = 1 << 38  # to one node, for one attempt
MUCH = 10**9  # bytes: it is said before they come

Stopped = Callable[[], None]


def bring(
    experiment: Experiment, record: JobRecord, gathered: Gathered, say: Say, stopped: Stopped
) -> None:
    """Bring it, and say so; on one disk that nodes share, wait until each sees all there is.

    CheckFailed says what cannot be brought.
    """
    alone = len(gathered.nodes) == len(record.attempts[-1].nodes) == 1
    if record.engine or alone:  # what the engine saves is brought otherwise
        return
    holders = [
        Holder(node.name, node, node.address, channel, record.first_part(node))
        for node, channel in zip(gathered.nodes, gathered.channels, strict=True)
    ]
    beats = Beats()
    for holder in holders:
        beats.begin(holder)
    try:
        LoneFiles(holders, given(experiment), record, say, stopped).bring()
    except NodeError as error:
        what = f"what the program saved is not the same on all nodes: {error.what}"
        raise CheckFailed(what, words.MEND) from error
    finally:
        beats.end()


def given(experiment: Experiment) -> tuple[str, ...]:
    """Return the directories that the launch gave the program to write, below its own."""
    try:
        sync = resolved.read(experiment.path).get("sync")
    except UsageError:
        return ()
    names = sync.get("outputs") if isinstance(sync, dict) else ()
    return tuple(str(name).strip("/") for name in names) if isinstance(names, list) else ()


class LoneFiles:
    """Sees to it that the nodes of the next attempt have the same saved files."""

    def __init__(
        self,
        holders: Sequence[Holder],
        given: Sequence[str],
        record: JobRecord,
        say: Say,
        stopped: Stopped,
    ) -> None:
        self.holders, self.given, self.record = holders, given, record
        self.say, self.stopped = say, stopped
        self.numbers = {
            node.name: frozenset(
                [node.index, *range(node.first_rank, node.first_rank + node.nproc)]
            )
            for node in record.nodes
        }

    def bring(self) -> None:
        views = self.look()
        if all(view.shared for view in views):
            self.await_all(views)
            return
        began = time.monotonic()
        bringing = Bringing(self.holders, views, self.given, self.stopped)
        decision = self.decide(views, bringing)
        loads = decision.loads
        totals = Counter[int]()
        for load in loads:
            totals[load.target] += views[load.source].files[load.key].size
        if (total := max(totals.values(), default=0)) > MOST_BYTES:
            raise CheckFailed(words.too_much(loads, total, views, MOST_BYTES), words.LARGE)
        if total > MUCH:
            self.say(words.begins(loads, views))
        bringing.go(loads, decision.gone)
        came = [load for load in loads if load.target not in bringing.failed]
        if came:
            self.say(words.come(came, views, time.monotonic() - began))
        if bringing.failed:
            raise CheckFailed(words.lacking(loads, views, bringing.failed), words.MEND)
        if count := sum(map(len, decision.gone.values())):
            copies = "1 copy" if count == 1 else f"{count} copies"
            self.say(f"{copies} removed of what was removed where it had been saved")
        for line in words.told(decision, views):
            self.say(line)
        names = {view.name for view in views}
        away = [name for name in self.record.attempts[-1].nodes if name not in names]
        if away and not any(view.files or view.kept for view in views):
            self.say(words.all_lost(away))

    def look(self) -> list[View]:
        return look(self.holders, self.given, self.numbers)

    def decide(self, views: Sequence[View], bringing: Bringing) -> Decision:
        """Decide; of files that several nodes wrote, find out whether they are the same."""
        nodes_of = {attempt.number: attempt.nodes for attempt in self.record.attempts}
        decision = Decide(views, nodes_of).go()
        alike = {
            key
            for key, nodes in decision.unlike.items()
            if len({views[node].files[key].size for node in nodes}) == 1
            and len({bringing.sample(node, key) for node in nodes}) == 1
        }
        return Decide(views, nodes_of, alike).go() if alike else decision

    def await_all(self, views: Sequence[View]) -> None:
        """Wait until all nodes see the same files of a disk that they share; CheckFailed if not."""
        behind = lagging(views)
        if behind:
            self.say(f"not every node sees {printable(behind)} yet: a network disk lags behind;"
                     f" waiting for it, {LAG_SECONDS:.0f} s at most")  # fmt: skip
        deadline = time.monotonic() + LAG_SECONDS
        while behind and time.monotonic() < deadline:
            self.stopped()
            time.sleep(LOOK_SECONDS)
            behind = lagging(self.look())
        if behind:
            raise CheckFailed(*words.unseen(behind, LAG_SECONDS))


def lagging(views: Sequence[View]) -> str:
    """Return the first file that only some nodes see, of one disk; or nothing."""
    if not all(view.whole for view in views):
        return ""
    sets = [set(view.files) for view in views]
    return str(min(sets[0].union(*sets) - sets[0].intersection(*sets), default=""))
