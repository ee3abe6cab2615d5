"""The events of the stages that start a job: reach, hold, send, plan, check, start.

Those of its next attempts are here as well.
"""

from __future__ import annotations

from orchestrator.head.screen.events import Alarm, HeadEvent

# -- hold: wait for a turn, for other experiments, for nodes ------------------------------------


class WaitsFor(HeadEvent, kw_only=False):
    sentence = "it waits: not before {experiment} is over"
    experiment: str


class WaitsInQueue(HeadEvent, kw_only=False):
    sentence = "in the queue: {reasons}"
    reasons: str


class LeftQueue(HeadEvent, kw_only=False):
    """Nodes cannot be asked: the launch reaches them again, and keeps its place."""

    sentence = "{why}"
    why: str


class WaitsForNodes(HeadEvent, kw_only=False):
    sentence = "waiting for {nodes} to come back, for {seconds:.0f} s at most"
    nodes: str
    seconds: float


class NodesChanged(HeadEvent, kw_only=False):
    """The next attempt has other nodes, or fewer."""

    sentence = "{how}"
    how: str


# -- send ---------------------------------------------------------------------------------------


class CodeSent(HeadEvent, kw_only=False):
    sentence = "code {digest} ({size}) on {nodes}{sent}"
    digest: str
    size: str
    nodes: str
    sent: str


class CodeNote(HeadEvent, kw_only=False):
    """Something of the code's directory that is not sent, or not as it is here."""

    sentence = "{what}"
    what: str


class FilesLinked(HeadEvent, kw_only=False):
    sentence = (
        "beside it, from their own {directory}: {names} (on {nodes}); what is written there stays"
        " there"
    )
    directory: str
    names: str
    nodes: str


class CopyImported(HeadEvent, kw_only=False):
    sentence = "{directory} is installed in the nodes' Python: ranks import the copy, and not that"
    directory: str


class RunsInCopy(HeadEvent, kw_only=False):
    sentence = "it runs there in a copy, {directory}; what it writes in it comes home at the end"
    directory: str


class MasterLost(HeadEvent, kw_only=False):
    sentence = "{master} is lost, with what it alone had: ranks find what {node} has"
    master: str
    node: str


class NothingCarried(Alarm, kw_only=False):
    sentence = (
        "WARNING: {nodes} lost, with what the program saved there: nothing is carried to the next"
        " attempt"
    )
    nodes: str


class TooManyFiles(Alarm, kw_only=False):
    sentence = "WARNING: {node}: too many files to look at: not all are brought to others"
    node: str


class FilesCopied(HeadEvent, kw_only=False):
    sentence = "{nodes} lacked {files} of {master}: came in {took}"
    nodes: str
    files: str
    master: str
    took: str


# -- plan and check -----------------------------------------------------------------------------


class PlanNote(HeadEvent, kw_only=False):
    """A setting that the plan has chosen or corrected."""

    sentence = "{what}"
    what: str


class Planned(HeadEvent, kw_only=False):
    sentence = "{ranks}, master {master}, {start} start"
    ranks: str
    master: str
    start: str


class CheckWarned(Alarm, kw_only=False):
    sentence = "warning: {finding}"
    finding: str


# -- start --------------------------------------------------------------------------------------


class Recorded(HeadEvent, kw_only=False):
    sentence = "logs in {logs}"
    logs: str


class RecordIncomplete(HeadEvent, kw_only=False):
    """A file that describes the job is missing, or lacks a part."""

    sentence = "{what}"
    what: str


class SparesUnused(HeadEvent, kw_only=False):
    sentence = "the spares are of no use to this job: what it runs is on its own nodes only"


class SpareRefused(HeadEvent, kw_only=False):
    sentence = "{node} cannot be a spare: {why}"
    node: str
    why: str


class SparesStandBy(HeadEvent, kw_only=False):
    sentence = "{count}: {nodes}"
    count: str
    nodes: str


class WarmStart(HeadEvent, kw_only=False):
    sentence = "warm start on {nodes}"
    nodes: str


class ColdStart(HeadEvent, kw_only=False):
    """A node with a standby process could not use it."""

    sentence = "{why}"
    why: str


class AttemptBegins(Alarm, kw_only=False):
    sentence = "attempt {number} of at most {most} ({why})"
    number: int
    most: int
    why: str


class AttemptRefused(HeadEvent, kw_only=False):
    sentence = "attempt {number} could not be started: {why}"
    number: int
    why: str


class JobGivenUp(HeadEvent, kw_only=False):
    sentence = "{why}; the job is given up"
    why: str
