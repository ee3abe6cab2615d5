"""The events of a job that is followed: its nodes, its ranks, its files, its end."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.head.screen import styles
from orchestrator.head.screen.events import Alarm, HeadEvent
from orchestrator.records.experiment import JobRecord
from orchestrator.records.outcome import JobVerdict

# -- its nodes ----------------------------------------------------------------------------------


class NodeLost(Alarm):
    sentence = "{node}: {why}; reconnecting"
    node: str
    why: str


class NodeIsBack(HeadEvent):
    sentence = "{node} is back after {seconds:.0f} s"
    style = styles.DONE
    node: str
    seconds: float


class NoNodeReached(Alarm):
    sentence = "no node was reached for {seconds:.0f} s"
    seconds: float


class NodeWarns(Alarm):
    """A follower warns of outputs or processes of the job that are left on its node."""

    sentence = "node {index}: {what}"
    index: int
    what: str


class GpuFailed(Alarm):
    sentence = "{node}: {error}; what uses that GPU will fail or hang"
    node: str
    error: str


class PeerUnreachable(Alarm):
    sentence = (
        "{node} cannot reach node 0's supervisor ({why}): without a head, an end on one will not"
        " be an end on the other. If that is a firewall, ranks that connect to each other hang as"
        " well: {fix}"
    )
    node: str
    why: str
    fix: str


class ClockIsOff(Alarm):
    sentence = "the clock of node {index} is {offset}; its times are corrected"
    index: int
    offset: str


# -- its ranks ----------------------------------------------------------------------------------


class RankIsSlow(Alarm):
    sentence = "{what}"
    what: str


class StacksKept(HeadEvent):
    sentence = "the stacks and collectives of all ranks are in {directory}"
    directory: str


class RanksKilled(Alarm):
    sentence = "{node}: killed {ranks}: still there {seconds:g} s after it was asked"
    node: str
    ranks: str
    seconds: float


# -- its files ----------------------------------------------------------------------------------


class FileUnwritable(Alarm):
    sentence = "{path} cannot be written: {why}"
    path: str
    why: str


class DiskIsFull(Alarm):
    sentence = (
        "no space left for {path}: the logs wait on the nodes, and come as soon as some is free"
    )
    path: str


class OutputLost(Alarm):
    sentence = (
        "{node}: the last {size} of output are in no log: there was no room for them on the disk"
        " of ~/.orchestrator there (`df -h ~`, `quota`)"
    )
    node: str
    size: str


class SharedMemoryStays(Alarm):
    sentence = "{node}: shared memory of the job stays there: {names}"
    node: str
    names: str


class FilesAreHome(HeadEvent):
    """The program wrote beside its code, and this came home."""

    sentence = "{what}"
    what: str


class FilesStay(HeadEvent):
    sentence = (
        "what the program wrote outside its directory and $ORCHESTRATOR_EXPERIMENT/outputs stays"
        " on the nodes: orchestrator pull PATH fetches it"
    )


# -- its user -----------------------------------------------------------------------------------


class KeysShown(HeadEvent):
    sentence = "{keys}"
    keys: str


class StopAsked(Alarm):
    sentence = "asking all ranks to save and stop ({grace:g} s); Ctrl-C again to kill"
    grace: float


class KillAsked(HeadEvent):
    sentence = "killing all ranks"


class TimeIsShort(Alarm):
    sentence = "the time limit of Slurm's job is near"


class SignalShared(HeadEvent):
    sentence = "the same signal has reached this head: the job is stopped"


class NotNotified(HeadEvent):
    """A command of --notify was not run, or has failed."""

    sentence = "{why}"
    why: str


# -- its end ------------------------------------------------------------------------------------


class EndBegins(Alarm):
    sentence = "{why}; ending {what} everywhere"
    style = styles.FAILED
    why: str
    what: str


class PartEnded(Alarm):
    sentence = "{node} ended its part: {why}"
    node: str
    why: str


class EndedElsewhere(Alarm):
    sentence = "{why}; this node ends its part"
    why: str


class AttemptOver(HeadEvent):
    """The end of a job, or of an attempt that another follows. The terminal has a report of it."""

    is_drawn = False
    kind: str
    record: JobRecord
    title: str
    cause: JobVerdict | None
    # The lines of the verdict.
    lines: Sequence[str]

    def words(self) -> str:
        return "\n".join([self.title, *self.lines])
