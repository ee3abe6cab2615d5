"""Hold what a launch has fixed for all nodes of its job, so that one that comes later fits in.

The head that launched the job has it in memory. A later one puts it together of the manifest, and
of the part that another node has: no record has the values of secrets.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.permissions import others
from orchestrator.config import parse
from orchestrator.config.launch import Origin, Where
from orchestrator.config.schema import Config
from orchestrator.head.connect.reach import Reached, for_now
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import plan
from orchestrator.head.plan.model import EnvSetting, Plan, Target
from orchestrator.head.start import code
from orchestrator.head.start.nodes import settled
from orchestrator.head.start.payload import CALL
from orchestrator.head.start.planning import Meeting, Prepared, specs
from orchestrator.head.start.request import Request
from orchestrator.head.start.variables import hook
from orchestrator.head.transfer.code import archive
from orchestrator.head.transfer.code.scan import Scan
from orchestrator.head.transfer.tree import Tree
from orchestrator.protocol.message import Nonsense, decode
from orchestrator.protocol.requests.start import AskPart, Start
from orchestrator.protocol.spec import Spec
from orchestrator.records import manifest as manifests
from orchestrator.records.experiment import Experiment, JobRecord

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


# -- of a job that another head has launched ----------------------------------------------------


def restored(experiment: Experiment, transport: Transport) -> Blueprint:
    """Return the blueprint of a job, as far as it can be had; CheckFailed says what cannot."""
    log.info("puts together what %s launched, from its record and a node", experiment.name)
    record = experiment.read_record()
    manifest = trusted_manifest(experiment)
    spec = part_of_another(record, transport)
    if spec.files or spec.target.name == CALL or spec.config is None:
        raise CheckFailed("a job of accelerate or of a function keeps the nodes that it had")
    try:
        request = request_of(experiment, record, manifest, spec)
        listed = tuple(decode(Node, each, newer=True) for each in manifest["node_list"])
        nodes = tuple(map(node_of(listed, request), manifest["nodes"]))
    except (Nonsense, KeyError, TypeError) as error:
        what = f"{experiment.path / manifests.NAME} does not say how it was launched: {error!r}"
        raise CheckFailed(what, f"orchestrator rerun {experiment.name}") from error
    job = record.attempts[0].job if record.attempts else record.job
    taken = max(record.first_part(node)[1] for node in (*record.nodes, *record.spares))
    meeting = Meeting(spec.master, 0, secrets.token_hex(32))
    numbers = itertools.count(taken + 1)
    return Blueprint(
        request, transport, experiment, job, spec.port, nodes, listed, meeting, numbers
    )


def trusted_manifest(experiment: Experiment) -> dict[str, Any]:
    """Return the manifest, if nobody else can have written it or the code beside it."""
    for path in (experiment.path, experiment.path / manifests.NAME, experiment.path / archive.NAME):
        with contextlib.suppress(FileNotFoundError):
            if (problem := others(os.lstat(path))) and not experiment.trusted:
                raise CheckFailed(f"{path} {problem}", f"chmod -R go-w {experiment.path}")
    return manifests.read(experiment)


def part_of_another(record: JobRecord, transport: Transport) -> Spec:
    """Return what a node was given that still has its part."""
    known = sorted((*record.nodes, *record.spares), key=lambda node: node.state == "lost")
    problems = []
    for node in known:
        job, part = record.first_part(node)
        try:
            with for_now(transport, node) as channel:
                return channel.ask(AskPart(job=job, node=part), ASK_SECONDS).spec
        except OrchestratorError as error:
            problems.append(f"{node.name}: {error.what}")
    raise NodeError(
        "no node that answers has its part any more, with the values that no record has: "
        + "; ".join(problems)
    )


def request_of(
    experiment: Experiment, record: JobRecord, manifest: Mapping[str, Any], spec: Spec
) -> Request:
    """Put the request together that the launch began with."""
    directory, target = Path(str(manifest["directory"])), spec.target
    reasons = manifest["nodes"][0]["reasons"]
    typed = {name: why for name, why in reasons.items() if why.startswith("--")}
    sent = bool(manifest["tree"])  # then the node does not have it to be looked at
    is_file = target.kind in ("script", "program") and not sent
    before = manifest["rerun_of"]
    return Request(
        where=Where(
            ssh_config=Path(record.ssh_config) if record.ssh_config else None,
            experiments=experiment.path.parent,
        ),
        config=parse.build(Config, spec.config),
        target=Target("auto" if is_file else target.kind, target.name, target.args),
        env=tuple(
            EnvSetting(name, spec.env[name], why, yours=True, secret=name in spec.secrets)
            for name, why in typed.items()
            if name in spec.env
        ),
        command=tuple(record.command),
        origin=Origin(before, directory, manifest["code"]) if before else None,
        secret_files=tuple(
            directory / why.removeprefix(ENV_FILE)
            for why in typed.values()
            if why.startswith(ENV_FILE)
        ),
        directory=directory,
        hook=hook_of(spec.config["launch"].get("hook"), directory, manifest) if spec.config else "",
    )


def hook_of(path: str | None, directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the hook of the launch, if it is still what it was then."""
    if not manifest["hook"]:
        return ""
    place = directory / str(path)
    text = hook.read(str(place))
    if hook.digest(text) != manifest["hook"]:
        raise CheckFailed(f"the hook {place} is not what it was at the launch", "put that back")
    return text


def node_of(listed: tuple[Node, ...], request: Request) -> Any:
    """Return what makes a node of the launch of its lines in the manifest."""
    by_name = {node.name: node for node in listed}

    def node(data: Mapping[str, Any]) -> ProbedNode:
        known = settled(by_name[data["name"]], request.config.launch)
        return ProbedNode(known, Facts.from_json(data["facts"]), data["reached"])

    return node
