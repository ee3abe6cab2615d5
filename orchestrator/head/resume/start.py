"""Before a job starts: which earlier state its config asks for, and on whose disks it may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.config.launch import Where
from orchestrator.config.schema import Checkpoint
from orchestrator.head.connect.transport import Transport
from orchestrator.head.resume.holder import Holder
from orchestrator.head.resume.search import Search, others_than
from orchestrator.protocol.requests.transfer import Checkpoints
from orchestrator.records import experiments
from orchestrator.records.experiment import STAMP, Experiment, JobRecord

MOST_LOOKED_AT = 8  # earlier experiments: those before them have other states


@dataclass(frozen=True)
class Start:
    """A job that is about to start, and the nodes that it could have had."""

    checkpoint: Checkpoint
    where: Where
    name: str
    own: Sequence[Holder]  # its nodes
    others: Sequence[Holder]  # all nodes of the list


def bring(start: Start, transport: Transport, say: Say) -> None:
    """Bring what the nodes lack together of the state that the config asks for, as the ranks will.

    CheckFailed where parts of it are known, and none of its states is whole.
    """
    checkpoint = start.checkpoint
    named = checkpoint.resume if checkpoint.resume != "auto" else None
    directory = checkpoint.directory if named is None else named
    known = list(earlier(start, named))[:MOST_LOOKED_AT]
    search = Search(start.own, transport, say, lambda: None, start.where.experiments)
    try:
        if directory is not None and (named is None or not known):
            # Below the code it is the node's own; and before the first run nobody has anything.
            if directory.startswith(("/", "~/")) and (named is not None or known):
                question = Checkpoints(directory=directory)
                search.bring(question, others_than(start.own, start.others), directory)
            return
        old = [others_than(start.own, holders_of(experiment.read_record())) for experiment in known]
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


def holders_of(record: JobRecord) -> list[Holder]:
    """List the nodes of an earlier job, of all of its attempts."""
    before = {name for attempt in record.attempts for name in attempt.nodes}
    spares = [node for node in record.spares if node.name in before]
    return [Holder(node.name, node, node.address) for node in (*record.nodes, *spares)]
