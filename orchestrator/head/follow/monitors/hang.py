"""Detect a job that hangs, and find the rank for which the others wait.

Torch's flight recorders number the collectives of each process group and backend. Ranks that have
entered collective 412 wait for ranks that have not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.common import files
from orchestrator.head.events import of_job
from orchestrator.head.follow.monitors.watchers import Watcher
from orchestrator.head.follow.streams.follower import NodeFollower
from orchestrator.head.follow.verdict import FRAME, PACKAGES, Failure
from orchestrator.head.screen.events import tell
from orchestrator.protocol.events import RankStacks
from orchestrator.protocol.requests.follow import AskStuck, has_ended
from orchestrator.records.experiment import Experiment, JobRecord

OURS = re.compile(r"/orchestrator/node/job/.*[.]py$")
DEFAULT_GROUP = "0"


# Torch's name of the process group, and the backend.
Group = tuple[str, str]


@dataclass(frozen=True)
class StuckRank:
    """One rank of a hanging job."""

    rank: int
    node: int
    # The state of the process as in /proc: R, S, D, T.
    state: str
    # The innermost frame of the program's own code, as "file:line function()".
    where: str
    # The collective it waits in: number, name, start as Unix time.
    waits: Mapping[Group, tuple[int, str, float]]
    # The number of the last collective that it entered.
    entered: Mapping[Group, int]


def stuck_rank(rank: int, node: int, answer: RankStacks) -> StuckRank:
    waits, entered = read_collectives(answer.collectives)
    return StuckRank(rank, node, answer.state, innermost_line(answer), waits, entered)


def read_collectives(text: str) -> tuple[dict[Group, tuple[int, str, float]], dict[Group, int]]:
    """Return from a flight recorder's dump the pending and the last entered collective per group.

    A backend runs its collectives in order. So an unfinished one before a finished one is not
    pending: for coalesced collectives NCCL records only one end, as a further entry.
    """
    waits: dict[Group, tuple[int, str, float]] = {}
    entered: dict[Group, int] = {}
    try:
        for entry in json.loads(text)["entries"]:
            if entry.get("is_p2p"):
                continue
            backend, _, name = entry["profiling_name"].rpartition(":")
            group, number = (str(entry["process_group"][0]), backend), entry["collective_seq_id"]
            entered[group] = max(int(number), entered.get(group, 0))
            if has_ended(entry):
                waits.pop(group, None)
            else:
                waits.setdefault(group, (int(number), name, entry["time_created_ns"] / 1e9))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        # This version of torch writes dumps of another format.
        return {}, {}
    return waits, entered


# The file, the line and the function.
Frame = tuple[str, str, str]


def innermost_line(answer: RankStacks) -> str:
    """Return the innermost line of the main thread outside of packages, else its program."""
    frames = [match.groups() for match in map(FRAME.match, answer.stacks.splitlines()) if match]
    outside = [frame for frame in frames if not PACKAGES.search(frame[0])]
    for file, line, function in (outside or frames)[:1]:
        return f"{file}:{line} {function}()"
    return answer.program


def absent_ranks(ranks: Sequence[StuckRank]) -> tuple[list[StuckRank], str]:
    """Return the ranks that never entered a collective in which others wait, and its name."""
    for stuck in ranks:
        for group, (number, name, _) in stuck.waits.items():
            missing = [
                other
                for other in ranks
                if other.entered.get(group, 0) < number
                and (group in other.entered or group[0] == DEFAULT_GROUP)
            ]
            free = [other for other in missing if not other.waits] or missing
            if free:
                return free, f"{name} #{number}"
    return [], ""


def find_culprit(ranks: Sequence[StuckRank]) -> StuckRank | None:
    """Return the rank that most likely causes the hang, None if all are alike."""
    stopped = [stuck for stuck in ranks if stuck.state in "Tt"]
    missing, _ = absent_ranks(ranks)
    return next(iter([*stopped, *missing]), None)


def describe_hang(ranks: Sequence[StuckRank]) -> str:
    """Return a sentence on where the ranks wait, and what the culprit does instead."""
    waiting = [stuck for stuck in ranks if stuck.waits]
    if not ranks:
        return "no rank has started: every torchrun waits for the others, at the master's port"
    for stuck in ranks:
        if stuck.state in "Tt":
            return "it is stopped (SIGSTOP, or a debugger), and the others wait for it"
    missing, what = absent_ranks(ranks)
    if missing:
        return f"{rank_names(missing)} never entered {what}; {what_rank_does(missing[0])}"
    for group in {group for stuck in waiting for group in stuck.waits}:
        if len({stuck.waits[group][1] for stuck in waiting if group in stuck.waits}) > 1:
            return f"the ranks are in different collectives: {rank_places(waiting, group)}"
    if at_one_place(ranks):
        return f"all ranks are at the same place: {ranks[0].where}"
    if waiting and len(waiting) == len(ranks):
        number, name, _ = next(iter(waiting[0].waits.values()))
        return f"all ranks are in {name} #{number}: the network between them, or a GPU, is stuck"
    idle = [stuck for stuck in ranks if not stuck.waits]
    return f"no rank makes progress; rank {idle[0].rank}: {what_rank_does(idle[0])}"


def at_one_place(ranks: Sequence[StuckRank]) -> bool:
    """Return True if all ranks are at the same line or program, and none waits in a collective.

    Only file names are compared, as snapshots have other directories on each node.
    """
    places = {stuck.where.rpartition("/")[2] for stuck in ranks}
    return len(places) == 1 and places != {""} and not any(stuck.waits for stuck in ranks)


def fix_of_hang(ranks: Sequence[StuckRank]) -> str:
    """Return the fix for a hang without a rank that differs from the rest, else ""."""
    if not ranks:
        return "orchestrator doctor: does every node reach the master's port?"
    if at_one_place(ranks):
        return (
            "see what that line waits for: a file, a server, a lock, an input; a program that may"
            " be silent for longer: --hang-timeout SECONDS, or 0"
        )
    return ""


# A rank in one of these files waits for others, even if no collective is recorded. In the frames
# that are further out, torchrun starts the rank.
IN_TORCH = re.compile(r"/torch/(distributed|nn/parallel)/|/torch/autograd/graph|(/ranks/rank\.py)")


def missed_rank(ranks: Sequence[tuple[StuckRank, RankStacks]]) -> tuple[StuckRank, str] | None:
    """Return the rank that others waited for in vain, and a sentence on it; None if unknown."""
    missing, what = absent_ranks([stuck for stuck, _ in ranks])
    if not missing:
        missing = [
            stuck
            for stuck, stacks in ranks
            if stacks.stacks and not stuck.waits and not waits_in_torch(stacks.stacks)
        ]
        what = "a collective"
    if not missing:
        return None
    others = f" (so did {rank_names(missing[1:])})" if missing[1:] else ""
    return missing[0], f"it did not come to {what} in time{others}; {what_rank_does(missing[0])}"


def waits_in_torch(stacks: str) -> bool:
    first = IN_TORCH.search(stacks)
    return first is not None and not first[2]


def rank_names(ranks: Sequence[StuckRank]) -> str:
    if len(ranks) == 1:
        # The sentence begins with the rank's name.
        return "it"
    return f"ranks {', '.join(str(stuck.rank) for stuck in ranks)}"


def what_rank_does(stuck: StuckRank) -> str:
    if stuck.waits:
        number, name, _ = next(iter(stuck.waits.values()))
        return (
            f"it waits in {name} #{number} of another group, at {stuck.where or 'an unknown place'}"
        )
    if stuck.state == "D":
        return f"it waits in the kernel (a disk or a network file system), at {stuck.where}"
    return f"it is in {stuck.where}" if stuck.where else "its position is unknown"


def rank_places(ranks: Sequence[StuckRank], group: Group) -> str:
    parts = [
        f"rank {stuck.rank} in {stuck.waits[group][1]}"
        + (f" at {stuck.where}" if stuck.where else "")
        for stuck in ranks
        if group in stuck.waits
    ]
    return ", ".join(parts[:6])


def oldest_wait(stuck: StuckRank, now: float) -> float:
    """Return the seconds of a rank's longest wait; by CPU use alone, NCCL's spinning looks busy."""
    return now - min((since for _, _, since in stuck.waits.values()), default=now)


# A longer time between two checks, normally 0.1 s apart, means that this process was suspended.
STOOD_STILL = 1.0


class HangMonitor(Watcher[Failure]):
    """Detects a hang: no node printed anything or made progress for `timeout` seconds.

    A program that reports no steps and keeps its CPUs busy may also hang, as NCCL spins. After
    such a silence its ranks are queried as well, and the age of a collective decides.
    """

    def __init__(self, timeout: float, experiment: Experiment, record: JobRecord) -> None:
        super().__init__()
        self.timeout, self.experiment, self.record = timeout, experiment, record
        self.over = not timeout
        self.settled_at = self.checked_at = time.monotonic()

    def check(self, followers: Sequence[NodeFollower]) -> Failure | None:
        """Return the failure once a hang is detected, else None."""
        before, self.checked_at = self.checked_at, time.monotonic()
        if self.checked_at - before > STOOD_STILL:
            self.settled_at = self.checked_at
        return super().check(followers)

    def watch(self) -> Generator[float, None, Failure]:
        while True:
            silent = min((f.silent for f in self.followers), default=0.0)
            known = min(silent, time.monotonic() - self.settled_at)
            if known > self.timeout:
                yield from self.ask_and_hear(self.question)
                self.settled_at = time.monotonic()
                if failure := self.failure():
                    return failure
            yield 0.0

    def question(self, follower: NodeFollower) -> AskStuck:
        return AskStuck(job=self.record.job, part=follower.node.part, attempt=self.record.attempt)

    def failure(self) -> Failure | None:
        asked = [f.node for f in self.followers if f.node.index in self.answers]
        ranks = [
            (stuck_rank(rank, node.index, stacks), stacks)
            for node in asked
            for rank, stacks in sorted(self.answers[node.index].stuck.items())
            if rank in node.numbers
        ]
        stuck = [rank for rank, _ in ranks]
        # Each wait is measured by its own node's clock, as others may be far off.
        waits = (oldest_wait(one, self.answers[one.node].time) for one in stuck)
        idle = min((follower.idle for follower in self.followers), default=0.0)
        if idle <= self.timeout and max(waits, default=0.0) <= self.timeout:
            # The ranks are busy with work that prints nothing.
            return None
        if ranks:
            self._keep(ranks)
        message = f"no progress for {max(idle, self.timeout):.0f} s: {describe_hang(stuck)}"
        found = Failure(None, "", None, time.time(), "hang", message, fix=fix_of_hang(stuck))
        who = find_culprit(stuck)
        if who is None:
            return found
        names = {f.node.index: f.node.name for f in self.followers}
        return replace(found, node=who.node, node_name=names[who.node], rank=who.rank)

    def _keep(self, ranks: Sequence[tuple[StuckRank, RankStacks]]) -> None:
        directory = self.experiment.path / "hang"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            for rank, stacks in ranks:
                path = directory / f"node_{rank.node}_rank_{rank.rank}_stacks.txt"
                files.replace_file(path, stacks.stacks.encode("utf-8", "replace"))
                if stacks.collectives:
                    path = path.with_name(f"node_{rank.node}_rank_{rank.rank}_collectives.json")
                    files.replace_file(path, stacks.collectives.encode("utf-8", "replace"))
            tell(of_job.StacksKept(str(directory)))
        except OSError as error:
            tell(of_job.FileUnwritable(str(directory), str(error.strerror)))
