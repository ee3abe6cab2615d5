"""Before the next attempt: what the program wrote on some of its nodes comes to all of them.

Where nodes share no disk, ranks there would find nothing, and begin anew beside those that go on.
So what cannot be brought ends the attempt before it begins: the trained numbers would be wrong.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, UsageError
from orchestrator.common.text import Say
from orchestrator.config import resolved
from orchestrator.head.connect import fleet
from orchestrator.head.screen.output import Progress, printable
from orchestrator.head.transfer.bring import words
from orchestrator.head.transfer.bring.decide import Copying, Decision, Key, View, decide
from orchestrator.head.transfer.bring.exchange import LONGEST_SECONDS, Bundle, Exchange, Stopped
from orchestrator.head.transfer.bring.partner import Beats, Partner
from orchestrator.head.transfer.fetch.fetch import plain
from orchestrator.head.transfer.schedule import WIDTH, Rules
from orchestrator.head.transfer.take import QUICK_SECONDS
from orchestrator.protocol.requests.saved import AskSaved, Saved, TakeSaved
from orchestrator.protocol.requests.transfer import GivingNode, NamedFile, SumOutput
from orchestrator.records.experiment import Experiment, JobRecord

ANSWER_SECONDS = 15.0
LAG_SECONDS = 70.0  # NFS keeps attributes for 60 s at most, unless it is told otherwise
LOOK_SECONDS = 1.0
MOST_BYTES = 1 << 38  # to one node, for one attempt
MUCH_BYTES = 10**9  # it is said before they come
DISK_BYTES_PER_SECOND = 20e6  # of a slow disk whose files get their checksums
SUMS_AT_ONCE = 64
AGAIN_SECONDS = (1.0, 5.0, 10.0)  # before each other try: a line may come back


def bring_saved(
    experiment: Experiment,
    record: JobRecord,
    partners: Sequence[Partner],
    say: Say,
    stopped: Stopped,
) -> None:
    """Bring it, and say so; on one disk that nodes share, wait until each sees all there is.

    The partners are the nodes of the next attempt, over open channels, with their part of the
    first one as `job`. CheckFailed says what cannot be brought.
    """
    alone = len(partners) == len(record.attempts[-1].nodes) == 1
    if record.engine or alone:  # what the engine saves is brought otherwise
        return
    beats = Beats(partners)
    try:
        SavedFiles(partners, given(experiment), record, say, stopped).bring()
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


class SavedFiles:
    """Sees to it that the nodes of the next attempt have the same files of the program."""

    def __init__(
        self,
        partners: Sequence[Partner],
        given: Sequence[str],
        record: JobRecord,
        say: Say,
        stopped: Stopped,
    ) -> None:
        self.partners, self.given, self.record = partners, tuple(given), record
        self.say, self.stopped = say, stopped

    def bring(self) -> None:
        views = self.views()
        if all(view.shared for view in views):
            self.await_all(views)
            return
        began = time.monotonic()
        nodes_of = {attempt.number: attempt.nodes for attempt in self.record.attempts}
        decision = decide(views, nodes_of)
        copies = decision.copies
        self.check_size(copies, views)
        failed = self.carry_out(decision, views)
        came = [copy for copy in copies if copy.target not in failed]
        if came:
            self.say(words.come(came, views, time.monotonic() - began))
        if failed:
            raise CheckFailed(words.lacking(copies, views, failed), words.MEND)
        if count := sum(map(len, decision.gone.values())):
            removed = "1 copy" if count == 1 else f"{count} copies"
            self.say(f"{removed} removed of what was removed where it had been saved")
        for line in words.notes(decision, views):
            self.say(line)
        names = {view.name for view in views}
        away = [name for name in self.record.attempts[-1].nodes if name not in names]
        if away and not any(view.files or view.kept for view in views):
            self.say(words.all_lost(away))

    def views(self) -> list[View]:
        """Ask each node; one that does not answer has nothing, and that may not be all."""

        def ask(partner: Partner) -> Saved:
            job, node = partner.job
            question = AskSaved(job=job, node=node, given=self.given)
            with partner.lock:
                return partner.open.ask(question, ANSWER_SECONDS)

        answers = fleet.everywhere(self.partners, ask)
        return [
            View(partner.name, whole=False)
            if isinstance(answer, OrchestratorError)
            else view(partner.name, answer)
            for partner, answer in zip(self.partners, answers, strict=True)
        ]

    def check_size(self, copies: Sequence[Copying], views: Sequence[View]) -> None:
        totals = Counter[int]()
        for copy in copies:
            totals[copy.target] += views[copy.source].files[copy.key].size
        if (total := max(totals.values(), default=0)) > MOST_BYTES:
            raise CheckFailed(words.too_much(copies, total, views, MOST_BYTES), words.LARGE)
        if total > MUCH_BYTES:
            self.say(words.begins(copies, views))

    # -- bringing ----------------------------------------------------------------------------

    def carry_out(self, decision: Decision, views: Sequence[View]) -> dict[int, str]:
        """Bring and remove what was decided; return which nodes that failed on, and why."""
        total = sum(views[copy.source].files[copy.key].size for copy in decision.copies)
        progress = Progress("bringing what one node alone has saved", total)
        exchange = Exchange(self.partners, progress, self.stopped)
        exchange.go(list(self.bundles(decision.copies, views)))
        failed = {node: error.what for node, error in exchange.failed.items()}
        gone = [
            (node, place, tuple(key.path for key in keys))
            for node, all_keys in decision.gone.items()
            for place, keys in groupby(sorted(all_keys), key=lambda key: key.place)
        ]

        def remove(item: tuple[int, str, tuple[str, ...]]) -> None:
            node, place, paths = item
            request = self.request(node, place).replace(gone=paths)
            if problem := self.partners[node].take(request, progress, self.stopped):
                raise NodeError(problem[:300])

        for (node, _, _), result in zip(gone, fleet.everywhere(gone, remove), strict=True):
            if isinstance(result, OrchestratorError):
                failed[node] = result.what
        return failed

    def bundles(self, copies: Sequence[Copying], views: Sequence[View]) -> Iterator[Bundle]:
        """Put together what the same nodes lack of one node, so that they can give it on."""
        lacking: dict[tuple[int, str, str, int], list[Copying]] = defaultdict(list)
        for copy in copies:
            lacking[copy.source, copy.key.place, copy.by, copy.target].append(copy)
        alike: dict[tuple[int, str, str, frozenset[Key]], list[int]] = defaultdict(list)
        for (source, place, by, target), group in lacking.items():
            alike[source, place, by, frozenset(copy.key for copy in group)].append(target)
        replaces = {(copy.target, copy.key) for copy in copies if copy.replaces}
        sums: dict[int, dict[Key, str]] = defaultdict(dict)
        for (source, place, by, keys), targets in alike.items():
            self.add_sums(sums[source], source, keys, views)
            yield self.bundle(source, place, by, keys, targets, views, sums[source], replaces)

    def bundle(
        self,
        source: int,
        place: str,
        by: str,
        keys: frozenset[Key],
        targets: Sequence[int],
        views: Sequence[View],
        sums: Mapping[Key, str],
        replaces: set[tuple[int, Key]],
    ) -> Bundle:
        origin = views[source]
        links = {key.path: origin.files[key].target for key in keys if key not in sums}
        above = {directory for key in keys for directory in directories_of(key)}
        times = {d.path: origin.directories[d] for d in above if d in origin.directories}
        files = tuple(
            NamedFile(path=key.path, size=file.size, sum=sums[key], mode=file.mode,
                      changed=file.changed)
            for key in sorted(keys & sums.keys())
            for file in [origin.files[key]]
        )  # fmt: skip

        def request(target: int, giver: GivingNode) -> TakeSaved:
            older = tuple(key.path for key in sorted(keys) if (target, key) in replaces)
            whole = self.request(target, place).replace(by=by, files=files, links=links)
            return whole.replace(directories=times, older=older, giver=giver)

        return Bundle(
            source,
            targets,
            frozenset(key.path for key in keys),
            lambda node: views[node].roots.get(place, ""),
            request,
            Rules(WIDTH, streams=False, pauses=AGAIN_SECONDS, through_head=False),
        )

    def request(self, target: int, place: str) -> TakeSaved:
        job, node = self.partners[target].job
        return TakeSaved(
            job=job,
            node=node,
            given=self.given,
            place=place,
            by="",
            files=(),
            links={},
            directories={},
            gone=(),
            older=(),
            seconds=LONGEST_SECONDS,
        )

    def add_sums(
        self, sums: dict[Key, str], node: int, keys: frozenset[Key], views: Sequence[View]
    ) -> None:
        """Have a node read its files for their checksums, many asked for at once: it may be far."""
        partner, view = self.partners[node], views[node]
        files = sorted(k for k in keys - sums.keys() if view.files[k].kind == "file")
        for at in range(0, len(files), SUMS_AT_ONCE):
            self.stopped()
            some = files[at : at + SUMS_AT_ONCE]
            total = sum(view.files[key].size for key in some)
            with partner.lock:
                asked = []
                for key in some:
                    size = view.files[key].size
                    question = SumOutput(
                        place=view.roots[key.place], path=key.path, offset=0, size=size + 1
                    )
                    asked.append((key, question, partner.open.tell(question)))
                for key, question, number in asked:
                    seconds = QUICK_SECONDS + total / DISK_BYTES_PER_SECOND
                    answer = partner.open.wait_for(number, question, seconds)
                    if answer.size != view.files[key].size:
                        raise NodeError(f"{partner.name}: {key.path} changes while it is read")
                    sums[key] = answer.sum

    # -- a disk that all share ---------------------------------------------------------------

    def await_all(self, views: Sequence[View]) -> None:
        """Wait until all nodes see what any saw at first on their disk; CheckFailed if not."""
        wanted = set[Key]().union(*(view.files for view in views))
        late = unseen(wanted, views)
        if late:
            self.say(f"not every node sees {printable(late)} yet: a network disk lags behind;"
                     f" waiting for it, {LAG_SECONDS:.0f} s at most")  # fmt: skip
        deadline = time.monotonic() + LAG_SECONDS
        while late and time.monotonic() < deadline:
            self.stopped()
            time.sleep(LOOK_SECONDS)
            late = unseen(wanted, self.views())
        if late:
            raise CheckFailed(*words.unseen(late, LAG_SECONDS))


def view(name: str, saved: Saved) -> View:
    """Take what a node says, but for names that lead out of its directories."""
    known = [file for file in saved.files if plain(file.path) and file.place in saved.roots]
    by_kind: dict[str, dict[Key, int]] = defaultdict(dict)
    for file in known:
        by_kind[file.kind][Key(file.place, file.path)] = file.changed
    return View(
        name,
        {Key(f.place, f.path): f for f in known if f.kind in ("file", "link")},
        frozenset(by_kind["removed"]),
        by_kind["directory"],
        saved.roots,
        saved.whole,
        saved.shared,
        saved.kept,
    )


def unseen(wanted: set[Key], views: Sequence[View]) -> str:
    """Return the first of these that only some nodes see; or nothing."""
    if not all(view.whole for view in views):
        return ""
    seen = [wanted & view.files.keys() for view in views]
    return str(min(seen[0].union(*seen) - seen[0].intersection(*seen), default=""))


def directories_of(key: Key) -> Iterator[Key]:
    path = key.directory
    while path:
        yield Key(key.place, path)
        path = path.rpartition("/")[0]
