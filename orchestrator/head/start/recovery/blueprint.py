"""Hold what a launch has fixed for all nodes of its job, for spares and nodes that lost their part.

Only the head that launched the job has it: no record has the values of secrets.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect.reach import Reached
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import plan
from orchestrator.head.plan.model import Plan
from orchestrator.head.start import code
from orchestrator.head.start.planning import Meeting, Prepared, specs
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
from orchestrator.head.transfer.code import archive
from orchestrator.head.transfer.code.scan import Scan
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.requests.start import Start
from orchestrator.records import manifest as manifests
from orchestrator.records.experiment import Experiment

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
ENV_FILE = "--env-file "  # before the path, in the reason of a variable


@dataclass(frozen=True)
class Blueprint:
    """All but a node's own facts that decides what the node is given."""

    request: Request
    transport: Transport
    experiment: Experiment
    job: str  # its first attempt
    port: int
    nodes: tuple[ProbedNode, ...]  # of the launch
    listed: tuple[Node, ...]  # in the node list
    meeting: Meeting
    numbers: Iterator[int]  # of further parts
    scan: Scan | None = None  # of the code, where no archive has it

    @classmethod
    def of(cls, prepared: Prepared, meeting: Meeting) -> Blueprint:
        """Describe a job that is about to start."""
        nodes, planned = prepared.nodes, prepared.plan
        return cls(
            request=prepared.request,
            transport=nodes.transport,
            experiment=prepared.experiment,
            job=planned.job,
            port=planned.master_port,
            nodes=tuple(nodes.probed),
            listed=nodes.source.nodes,
            meeting=meeting,
            numbers=itertools.count(len(planned.nodes)),
            scan=nodes.scan,
        )

    def part_of(self, node: Reached, index: int | None = None) -> Plan:
        """Plan the job as if the node were its last; what depends on its place is set later."""
        request = self.request
        probed = [
            replace(one, facts=one.facts.replace(port=self.port))
            for one in (*self.nodes[:-1], node.probed)
        ]
        planned = plan.make(
            *(self.job, str(self.experiment.path.absolute()), request.target, probed, ()),
            *(request.config, request.env),
            hinted=hook.variables(request.hook),
        )
        number = next(self.numbers) if index is None else index
        return replace(planned, nodes=(replace(planned.nodes[-1], index=number),))

    def order(self, node: Reached, part: Plan) -> Start:
        """Return what gives the node its part, once its hook was run there."""
        request = self.request
        if request.hook:
            path = request.config.launch.hook
            part = hook.run(part, [node], request.hook, path, request.secrets)
        (spec,) = specs(request, part, self.meeting)
        return Start(spec=spec, later=True)

    @contextlib.contextmanager
    def code(self) -> Iterator[Tree]:
        """Give the code that the job runs, whatever its directory holds by now."""
        digest = str(manifests.read(self.experiment).get("tree") or "")
        kept, directory = self.experiment.path / archive.NAME, self.request.directory
        if digest and kept.is_file():
            with archive.unpacked(kept, digest, directory.name) as tree:
                yield tree
        elif self.scan is not None or digest:
            tree = code.tree_for(self.request, self.scan or code.begin_scan(self.request))
            if digest and tree.digest != digest:
                raise CheckFailed(
                    f"the code of {self.experiment.name} was not kept, being larger than sync.keep,"
                    f" and {directory} holds other code by now",
                    "put that back; for later jobs: --set sync.keep=MEGABYTES",
                )
            yield tree
        else:
            raise CheckFailed("it does not share the directory that the others run in")
