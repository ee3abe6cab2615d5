"""From a node list to a running job: reach, plan, record, start everywhere, follow, conclude."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import interrupt
from orchestrator.config import load
from orchestrator.errors import CheckFailed, NodeError, OrchestratorError, UsageError
from orchestrator.head.connect import fleet
from orchestrator.head.connect.fleet import Reached
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow import verdict
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.inventory.probed_node import ProbedNode
from orchestrator.head.launch import git_info, payload, preflight, redact
from orchestrator.head.launch.request import Request, prepare
from orchestrator.head.plan import nccl_env, plan
from orchestrator.head.plan.accelerate import counted, planned
from orchestrator.head.plan.model import EnvSetting, NodePlan, Plan
from orchestrator.head.plan.plan import Layout
from orchestrator.head.slurm import batch_job
from orchestrator.protocol.messages import End, Hook, Start, StartedHere
from orchestrator.protocol.spec import LeaseTerms, Spec, Target
from orchestrator.records import experiment
from orchestrator.records.experiment import Experiment, JobRecord, NodeRecord
from orchestrator.version import __version__

HOOK_TIMEOUT = 70.0
START_TIMEOUT = 30.0


@dataclass(frozen=True)
class Launched:
    """A job that runs on all nodes now; the links are open."""

    experiment: Experiment
    record: JobRecord
    ssh: Transport
    reached: tuple[Reached, ...]


Say = Callable[[str], None]


def make_plan(
    request: Request,
    reached: Sequence[Reached],
    spares: Sequence[Node],
    job: str,
    directory: str,
    agreed: Layout | None = None,
) -> Plan:
    """Plan the job, or with `agreed` this machine's part of it (see plan.make)."""
    nodes = [one.probed for one in reached]
    hinted = variables(hook_text(request.config.launch.hook))
    by, config = request.accelerate, request.config
    if by and agreed is None:
        config = counted(config, by, nodes, len(nodes))
    made = plan.make(
        job, directory, request.target, nodes, spares, config, request.env,
        hinted=hinted, agreed=agreed,
    )  # fmt: skip
    made = planned(made, by, nodes, agreed) if by else made
    return warned(apply_hook(request, reached, made), nodes)


def apply_hook(request: Request, reached: Sequence[Reached], made: Plan) -> Plan:
    """Run the per-node shell file on every node; what it exports wins over what was computed."""
    text = hook_text(request.config.launch.hook)
    if not text:
        return made

    def run(pair: tuple[Reached, NodePlan]) -> NodePlan:
        one, node = pair
        answer = one.channel.ask(Hook(text=text, env=node.env, workdir=node.workdir), HOOK_TIMEOUT)
        fixed = {s.name for s in node.settings if s.why in ("identifies the node", "--env")}
        new = [
            EnvSetting(name, value, "the hook", yours=True)
            for name, value in answer.env.items()
            if name not in fixed
        ]
        kept = [s for s in node.settings if s.name not in answer.unset or s.name in fixed]
        unset = tuple(name for name in answer.unset if name not in fixed)
        return replace(node, settings=(*kept, *new), unset=unset)

    results = fleet.everywhere(list(zip(reached, made.nodes, strict=True)), run)
    failed = [
        (one.node, result)
        for one, result in zip(reached, results, strict=True)
        if isinstance(result, OrchestratorError)
    ]
    if failed:
        table = fleet.failure_table(failed, len(reached), f" ({request.config.launch.hook} failed)")
        raise CheckFailed(table + "\nnothing was started")
    nodes = tuple(result for result in results if isinstance(result, NodePlan))
    return replace(made, nodes=nodes)


def warned(made: Plan, probed: Sequence[ProbedNode]) -> Plan:
    """Warn of an interface that NCCL will not find, now that the hook has been applied too."""
    notes = []
    for one, node in zip(probed, made.nodes, strict=True):
        for setting in node.settings:
            name, value = setting.name, setting.value
            decides = setting.yours and node.env.get(name) == value
            if name == "NCCL_SOCKET_IFNAME" and decides and nccl_env.unmatched(value, one):
                has = ", ".join(sorted({address.interface for address in one.facts.addresses}))
                words = f"{name}={value} ({setting.why}) fits no interface of {one.name}: {has}"
                notes.append(f"WARNING: {words}")
    return replace(made, notes=(*made.notes, *notes))


def hook_text(path: str | None) -> str:
    """The hook, or nothing where it says nothing: comments alone need no shell on every node."""
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"the hook {path} cannot be read: {error.strerror}") from error
    lines = (line.strip() for line in text.splitlines())
    return text if any(line and not line.startswith("#") for line in lines) else ""


def launch(request: Request, say: Say) -> Launched:
    """Start the job on every node, or on none."""
    ssh, reached, spares = prepare(request)
    if request.parcel is not None:
        payload.check(reached)
    interrupt.hold()
    place = batch_job.experiment_of(
        request.experiments, request.config.launch.name, request.allocation
    )
    interrupt.undo_with(place.discard)
    interrupt.answer_now()
    job = f"{place.name}-{secrets.token_hex(3)}"
    try:
        made = make_plan(request, reached, spares, job, str(place.path))
        preflight.check(request, reached, say)
    except OrchestratorError:
        place.discard()
        raise
    interrupt.hold()  # from here on there is something to end: the run answers
    interrupt.undo_with(None)
    place.lock()
    record = first_record(request, made, job, place)
    write_down(request, record, place)
    announce(made, place, say)
    try:
        if request.parcel is not None:
            payload.deliver(reached, made, request.parcel)
        terms = lease(request, made, reached[0].facts.peers_port or 0, secrets.token_hex(32))
        start(request, reached, made, terms)
    except OrchestratorError as error:
        with contextlib.suppress(OSError):  # a full disk must not hide why it did not start
            place.write_record(not_started(record, error))
        raise
    finally:  # not before the start: git alone takes 10 ms, and seconds in a large tree
        text = json.dumps(manifest(request, reached, made), indent=1)
        try:
            place.write("manifest.json", text + "\n")
        except OSError as error:
            say(f"manifest.json is missing: {place.path}: {error.strerror}")
    return Launched(place, record, ssh, tuple(reached))


def write_down(request: Request, record: JobRecord, place: Experiment) -> None:
    """What anybody needs who is to find this job again."""
    shown = replace(request.config, env=redact.redacted(request.config.env))
    try:
        place.write_record(record)
        place.write("config.yaml", load.dump(shown))
    except OSError as error:
        place.discard()
        raise UsageError(
            f"{place.path} cannot be written: {error.strerror}; nothing was started",
            "free some space or name another directory with --experiments DIR",
        ) from error


def variables(text: str) -> frozenset[str]:
    """What a hook seems to set, before it is run: whether it does may depend on the node."""
    return frozenset(re.findall(r"\bNCCL_[A-Z_]+", text))


def announce(made: Plan, place: Experiment, say: Say) -> None:
    for note in made.notes:
        say(note)
    say(
        f"{len(made.nodes)} nodes, {made.world_size} ranks, master "
        f"{made.master_address}:{made.master_port}, {made.start} start"
    )
    say(f"logs in {place.logs}")


def start(request: Request, reached: list[Reached], made: Plan, terms: LeaseTerms) -> None:
    """The supervisors of all nodes; if one cannot start, the others are ended again."""

    def begin(pair: tuple[Reached, NodePlan]) -> StartedHere:
        one, node = pair
        spec = Spec(
            job=made.job,
            node=node.index,
            nnodes=int(node.env["NNODES"]),
            experiment=Path(node.env["ORCHESTRATOR_EXPERIMENT"]).name,
            nproc=node.nproc,
            first_rank=node.first_rank,
            start=made.start,
            agent=tuple(node.agent),
            files=tuple(node.files),
            env=node.env,
            unset=tuple(node.unset),
            workdir=node.workdir,
            target=Target(kind=node.target.kind, name=node.target.name, args=node.target.args),
            config=load.as_data(request.config),
            lease=terms,
            port=0 if node.index else made.master_port,
        )
        return one.channel.ask(Start(spec=spec), START_TIMEOUT)

    results = fleet.everywhere(list(zip(reached, made.nodes, strict=True)), begin)
    failed = [
        (one.node, result)
        for one, result in zip(reached, results, strict=True)
        if isinstance(result, OrchestratorError)
    ]
    if not failed:
        return
    for one, node in zip(reached, made.nodes, strict=True):
        try:
            order = End(job=made.job, node=node.index, why="not started", grace=0.0)
            one.channel.ask(order, 10.0)
        except NodeError:
            continue  # it is among the failed already
    raise NodeError(fleet.failure_table(failed, len(reached), "; the others were ended again"))


def lease(request: Request, made: Plan, port: int, token: str) -> LeaseTerms:
    """Return how the supervisors of this job find each other, and when they end it themselves."""
    launch = request.config.launch
    return LeaseTerms(
        address=made.master_address,
        port=port,
        token=token,
        seconds=launch.node_loss_timeout,
        wait=launch.on_node_loss == "wait",
        head=launch.on_head_loss,
        attached=not request.detached,
        grace=launch.grace,
    )


def not_started(record: JobRecord, error: OrchestratorError) -> JobRecord:
    now = time.time()
    told = verdict.not_started(error.what, now)
    return replace(record, state="failed", exit_code=error.exit_code, ended=now, verdict=told)


# -- the record -------------------------------------------------------------------------------


def first_record(request: Request, made: Plan, job: str, place: Experiment) -> JobRecord:
    nodes = [
        NodeRecord(
            index=node.index,
            name=node.node.name,
            host=node.node.host,
            user=node.node.user,
            port=node.node.port,
            address=node.address,
            python=node.python,
            first_rank=node.first_rank,
            nproc=node.nproc,
        )
        for node in made.nodes
    ]
    return JobRecord(
        job=job,
        experiment=str(place.path),
        state="starting",
        command=redact.redacted_words(request.command),
        nodes=nodes,
        started=time.time(),
        head=experiment.this_head(),
        ssh_config=str(request.ssh_config.absolute()) if request.ssh_config else None,
        master=f"{made.master_address}:{made.master_port}",
        start=made.start,
        grace=request.config.launch.grace,
        node_loss_timeout=request.config.launch.node_loss_timeout,
        on_node_loss=request.config.launch.on_node_loss,
        on_head_loss=request.config.launch.on_head_loss,
        hang_timeout=request.config.launch.hang_timeout,
        on_hang=request.config.launch.on_hang,
        strict_host_keys=request.config.launch.strict_host_keys,
        slurm_job=request.allocation.job if request.allocation else None,
        batch=bool(request.allocation and request.allocation.batch),
    )


def manifest(request: Request, reached: list[Reached], made: Plan) -> dict[str, Any]:
    """What is known at launch, for whoever wants to repeat or explain this run."""
    return {
        "orchestrator": __version__,
        "python": sys.version.split()[0],
        "command": shlex.join(redact.redacted_words(request.command)),
        "directory": str(Path.cwd()),
        "code": git_info.of(Path.cwd()),
        "config_file": str(request.config_file) if request.config_file else None,
        "head_environment": redact.redacted(os.environ),
        "nodes": [
            {
                "name": one.node.name,
                "facts": one.facts.to_json(),
                "environment": redact.redacted(node.env),
                "reasons": {s.name: s.why for s in node.settings},
                "command": redact.redacted_words(node.paste),
            }
            for one, node in zip(reached, made.nodes, strict=True)
        ],
    }


def user_env(words: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """--env K=V, or --env K for the value that K has here (so that a secret need not be typed)."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[:1].isdigit():
            raise UsageError(
                f"--env {word}: {name!r} cannot name a variable", "write --env NAME=VALUE"
            )
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: it is not set here", f"write --env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found
