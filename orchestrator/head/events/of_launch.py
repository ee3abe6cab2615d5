"""The events of the stages that start a job: reach, hold, send, plan, check, start.

Those of its next attempts are here as well.
"""

from __future__ import annotations

from orchestrator.head.screen.events import Alarm, HeadEvent

# -- hold: wait for a turn, for other experiments, for nodes ------------------------------------


class WaitsFor(HeadEvent):
    sentence = "it waits: not before {experiment} is over"
    experiment: str


class WaitsInQueue(HeadEvent):
    sentence = "in the queue: {reasons}"
    reasons: str


class LeftQueue(HeadEvent):
    """Nodes cannot be asked: the launch reaches them again, and keeps its place."""

    sentence = "{why}"
    why: str


class WaitsForNodes(HeadEvent):
    sentence = "waiting for {nodes} to come back, for {seconds:.0f} s at most"
    nodes: str
    seconds: float


class NodesChanged(HeadEvent):
    """The next attempt has other nodes, or fewer."""

    sentence = "{how}"
    how: str


# -- send ---------------------------------------------------------------------------------------


class CodeSent(HeadEvent):
    sentence = "code {digest} ({size}) on {nodes}{sent}"
    digest: str
    size: str
    nodes: str
    sent: str


class CodeNote(HeadEvent):
    """Something of the code's directory that is not sent, or not as it is here."""

    sentence = "{what}"
    what: str


class FilesLinked(HeadEvent):
    sentence = (
        "beside it, from their own {directory}: {names} (on {nodes}); what is written there stays"
        " there"
    )
    directory: str
    names: str
    nodes: str


class CopyImported(HeadEvent):
    sentence = "{directory} is installed in the nodes' Python: ranks import the copy, and not that"
    directory: str


class RunsInCopy(HeadEvent):
    sentence = "it runs there in a copy, {directory}; what it writes in it comes home at the end"
    directory: str


class MasterLost(HeadEvent):
    sentence = "{master} is lost, with what it alone had: ranks find what {node} has"
    master: str
    node: str


class NothingCarried(Alarm):
    sentence = (
        "WARNING: {nodes} lost, with what the program saved there: nothing is carried to the next"
        " attempt"
    )
    nodes: str


class TooManyFiles(Alarm):
    sentence = "WARNING: {node}: too many files to look at: not all are brought to others"
    node: str


class FilesCopied(HeadEvent):
    sentence = "{nodes} lacked {files} of {master}: came in {took}"
    nodes: str
    files: str
    master: str
    took: str


# -- plan and check -----------------------------------------------------------------------------


class PlanNote(HeadEvent):
    """A setting that the plan has chosen or corrected."""

    sentence = "{what}"
    what: str


class Planned(HeadEvent):
    sentence = "{ranks}, master {master}, {start} start"
    ranks: str
    master: str
    start: str


class CheckWarned(Alarm):
    sentence = "warning: {finding}"
    finding: str


# -- start --------------------------------------------------------------------------------------


class Recorded(HeadEvent):
    sentence = "logs in {logs}"
    logs: str


class RecordIncomplete(HeadEvent):
    """A file that describes the job is missing, or lacks a part."""

    sentence = "{what}"
    what: str


class SparesUnused(HeadEvent):
    sentence = "the spares are of no use to this job: what it runs is on its own nodes only"


class SpareRefused(HeadEvent):
    sentence = "{node} cannot be a spare: {why}"
    node: str
    why: str


class SparesStandBy(HeadEvent):
    sentence = "{count}: {nodes}"
    count: str
    nodes: str


class WarmStart(HeadEvent):
    sentence = "warm start on {nodes}"
    nodes: str


class ColdStart(HeadEvent):
    """A node with a standby process could not use it."""

    sentence = "{why}"
    why: str


class AttemptBegins(Alarm):
    sentence = "attempt {number} of at most {most} ({why})"
    number: int
    most: int
    why: str


class AttemptRefused(HeadEvent):
    sentence = "attempt {number} could not be started: {why}"
    number: int
    why: str


class JobGivenUp(HeadEvent):
    sentence = "{why}; the job is given up"
    why: str
