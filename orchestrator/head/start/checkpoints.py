"""Before the next attempt: bring what its nodes lack of the newest state, from those it leaves."""

from __future__ import annotations

from functools import partial

from orchestrator.common.errors import CheckFailed
from orchestrator.common.text import Say
from orchestrator.head.connect.transport import Transport
from orchestrator.head.resume.holder import Holder
from orchestrator.head.resume.search import Search, others_than
from orchestrator.head.start.recovery.gather import Gathered, refuse_if_stopped
from orchestrator.protocol.requests.transfer import Checkpoints
from orchestrator.records.experiment import Experiment, JobRecord


def bring(
    experiment: Experiment, record: JobRecord, gathered: Gathered, transport: Transport, say: Say
) -> None:
    """Bring it where nodes share no disk; without it the ranks take what is whole, and say so."""
    before = {name for attempt in record.attempts for name in attempt.nodes}
    left = [node for node in gathered.spares if node.name in before]
    if not left or record.scheduled:
        return
    own = [
        Holder(node.name, node, node.address, channel, (node.first_job, node.first_node))
        for node, channel in zip(gathered.nodes, gathered.channels, strict=True)
    ]
    stopped = partial(refuse_if_stopped, experiment)
    search = Search(own, transport, say, stopped, experiment.path)
    question = Checkpoints(experiment=experiment.name)
    try:
        if held := search.held(own, question):  # else it saves on a shared disk, or nothing
            others = [Holder(node.name, node, node.address) for node in left]
            search.bring(question, others_than(own, others), "", held)
    except CheckFailed as error:
        say(f"WARNING: {error.what}")
    finally:
        search.close()
