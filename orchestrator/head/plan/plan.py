"""Make a plan from the facts on the nodes: each node's ranks, command and environment. Pure.

This module counts ranks and chooses the start method and the master's port. nccl_env.py adds the
network's settings, dry_run.py prints the result.
"""

from __future__ import annotations

import logging
import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.common.errors import CheckFailed
from orchestrator.common.hosts import join_names
from orchestrator.config import sharding
from orchestrator.config.launch import Launch
from orchestrator.config.schema import Config
from orchestrator.head.nodes.facts import (
    Facts,
    ProbedNode,
    no_torch,
    node_names,
    nodes_by_value,
    version_release,
)
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import nccl_env
from orchestrator.head.plan.model import EnvSetting, Layout, NodeAddress, NodePlan, Plan
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.protocol.requests.claims import VISIBLE, DeviceRequest
from orchestrator.protocol.spec import Target

log = logging.getLogger(__name__)

# The fields of the spec that identify a node among the others, with torchrun's options for them.
OF_TORCHRUN = (
    *(("nnodes", "--nnodes"), ("node", "--node-rank")),
    *(("master", "--master-addr"), ("port", "--master-port")),
)
DEFAULT_PORT = 29500
COPY = (
    "copy it to the same path there, or name the directory that it is in: --workdir DIR for all"
    " nodes, workdir=DIR in the list for one"
)
MISSPELT = (
    "check its spelling: it is looked for in this directory or in --workdir DIR, and at the same"
    " path on nodes that do not share it"
)
# The fixes by the kind of a target that cannot be run.
NOT_READY = {
    "workdir": "copy it there, or name another directory: --workdir DIR for all nodes, workdir=DIR"
    " in the list for one",
    "missing": MISSPELT,
    "unreadable": "let the user of that node read it: chmod +r {name}",
    "not executable": "chmod +x {name}, or start it with its interpreter, as where its disk"
    " is mounted noexec: bash {name}",
    "a directory": "name a file in it, or give it a __main__.py",
}
# Before this version, torchrun's agent initialized CUDA when it counted devices.
OLDEST_FORK = (2, 1)
# This program is torchrun with a faster start.
AGENT = "orchestrator/node/job/ranks/fast_torchrun.py"
NO_TORCHRUN = "orchestrator/node/job/ranks/no_torchrun.py"
# Modules of this package, which is sent to every node. CALL runs the function of Cluster.run.
ENGINE = "orchestrator.engine.train"
CALL = "orchestrator.node.job.ranks.run_function"


def plan_job(
    request: LaunchRequest,
    nodes: Sequence[ProbedNode],
    job: str,
    experiment: str,
    agreed: Layout | None = None,
) -> Plan:
    """Return the plan of the whole job, or with `agreed` of the given nodes of a job (run-node).

    Raises CheckFailed if the launch would fail or give wrong results.
    """
    config, target = request.config, request.target
    kind = check_targets(target, nodes)
    if not all(node.facts.torch for node in nodes):
        raise no_torch(nodes)
    start, notes = choose_start(config.launch, kind, target, nodes)
    layout = agreed or lay_out(nodes, config)
    log.info("%s start of a %s; ranks: %s; port %d", start, kind, layout.counts, layout.port)
    if target.kind == "engine" and target.name == ENGINE:
        check_engine(config, layout.counts, nodes)
    first, master, hinted = layout.index, layout.master_ip or None, named_by_hook(request.hook)
    theirs = frozenset({*config.nccl.variables, *config.env, *(s.name for s in request.env)})
    net = nccl_env.make_network(
        nodes, config.nccl.profile, theirs, hinted, master=master, first=first
    )
    layout = replace(
        layout,
        master=layout.master or net.addresses[0].address,
        job=job,
        experiment=experiment,
        start=start,
        kind=kind,
    )
    log.info("network: %s; master %s", net.fabric.kind, layout.master)
    for name, address in zip((node.name for node in nodes), net.addresses, strict=True):
        log.debug("%s: address %s, %s", name, address.address, address)
    parts = zip(range(first, first + len(nodes)), nodes, net.addresses, net.settings, strict=True)
    return Plan(
        job=job,
        start=start,
        master_address=layout.master,
        master_port=layout.port,
        world_size=sum(layout.counts),
        nodes=tuple(plan_node(request, layout, *part) for part in parts),
        notes=(*notes, *layout.notes, *net.notes),
        transport=net.fabric.kind,
        hints=net.hints,
    )


def named_by_hook(text: str) -> frozenset[str]:
    """Return the NCCL variables that the hook's text mentions; it may set them on some nodes."""
    return frozenset(re.findall(r"\bNCCL_[A-Z_]+", text))


def lay_out(nodes: Sequence[ProbedNode], config: Config) -> Layout:
    """Return the layout with counted ranks and a port; the master's address is set later."""
    port, port_notes = choose_port(config, nodes[0])
    counts = [count_ranks(node, config.launch) for node in nodes]
    return Layout(
        counts=tuple(count for count, _ in counts),
        whys=tuple(reason for _, reason in counts),
        port=port,
        notes=(*port_notes, *uneven_notes(nodes, counts, config.launch)),
    )


# -- decisions --------------------------------------------------------------------------------


def check_targets(target: Target, nodes: Sequence[ProbedNode]) -> str:
    """Return the target's kind, the same on all nodes; raise if nodes lack it or disagree."""
    if target.kind == "engine":
        return "engine"
    # The names of nodes by the problem and its kind.
    problems: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        facts = node.facts
        if not facts.workdir_exists:
            problem = f"there is no directory {facts.workdir}", "workdir"
        elif facts.target_kind == "missing":
            is_word = "/" not in target.name and "." not in target.name
            command = f", and no command {target.name}" if is_word else ""
            problem = f"script not found: {facts.target_name}{command}", facts.target_kind
        elif facts.target_kind in NOT_READY:
            problem = f"{facts.target_name} is {facts.target_kind}", facts.target_kind
        else:
            continue
        problems.setdefault(problem, []).append(node.name)
    if problems:
        lacks = {kind for _, kind in problems}
        fix = NOT_READY.get(lacks.pop(), COPY) if len(lacks) == 1 else COPY
        # Copying is the fix if some nodes have the file.
        if fix == MISSPELT and sum(map(len, problems.values())) < len(nodes):
            fix = COPY
        details = [
            f"{what} ({len(where)} of {len(nodes)} nodes: {join_names(where)})"
            for (what, _), where in problems.items()
        ]
        details[-1] += target.near
        raise CheckFailed("\n  ".join(details), fix.format(name=shlex.quote(target.name)))
    of_kind = nodes_by_value((node.name, node.facts.target_kind) for node in nodes)
    if len(of_kind) > 1:
        each = sorted(of_kind.items())
        differences = "; ".join(f"{join_names(where)}: {kind}" for kind, where in each)
        raise CheckFailed(f"{target.name} is not the same on all nodes ({differences})")
    return next(iter(of_kind))


def check_engine(config: Config, counts: Sequence[int], nodes: Sequence[ProbedNode]) -> None:
    """Raise for a config that the built-in engine would reject in every rank on these nodes."""
    sharding.check_layout(config, counts)
    for node in nodes:
        if not node.facts.gpus:
            sharding.check_without_gpu(config, node.name, sum(counts))


def choose_start(
    launch: Launch, kind: str, target: Target, nodes: Sequence[ProbedNode]
) -> tuple[str, list[str]]:
    """Return the start method with notes: fork if it is safe, else plain with the reason."""
    if launch.start == "plain" or launch.no_torchrun:
        return "plain", []
    if kind == "program":
        return "plain", [f"plain start: {target.name} is a program, no script or module of Python"]
    for node in nodes:
        if (version_release(node.facts.torch) or (0, 0)) < OLDEST_FORK:
            return "plain", [f"plain start: torch {node.facts.torch} on {node.name} is too old"]
    return "fork", []


def choose_port(config: Config, master: ProbedNode) -> tuple[int, list[str]]:
    wanted = config.launch.master_port
    port = master.facts.port or 0
    if not port:
        which = f"port {wanted}" if wanted else f"no port from {DEFAULT_PORT} on"
        taken = "is taken" if wanted else "is free"
        raise CheckFailed(
            f"{which} {taken} on the master {master.node.name}",
            "leave the port out to get a free one, or choose another with --master-port",
        )
    if wanted is None and port != DEFAULT_PORT:
        return port, [f"port {DEFAULT_PORT} is taken on {master.node.name}: using {port}"]
    return port, []


def count_ranks(node: ProbedNode, launch: Launch) -> tuple[int, str]:
    if launch.nproc is not None:
        return launch.nproc, nproc_option(launch).split()[0]
    if launch.gpus is not None and node.facts.gpus:
        return launch.gpus, "--gpus"
    if node.node.slots is not None:
        return node.node.slots, listed_ranks(node.node)
    if node.facts.gpus:
        return node.facts.gpus, f"{node.facts.gpus} GPUs found"
    return 1, "no GPU found"


def listed_ranks(node: Node) -> str:
    """Return the source of a node's `slots` for messages."""
    return "slots= in the list" if node.line else "--ntasks-per-node"


def nproc_option(launch: Launch) -> str:
    """Return the option that sets the number of ranks of each node."""
    return "--no-torchrun" if launch.no_torchrun else f"--nproc {launch.nproc}"


def uneven_notes(
    nodes: Sequence[ProbedNode], counts: Sequence[tuple[int, str]], launch: Launch
) -> list[str]:
    notes = []
    if len({count for count, _ in counts}) > 1:
        differences = ", ".join(
            f"{node.name}: {n}" for node, (n, _) in zip(nodes, counts, strict=True)
        )
        notes.append(f"nodes have different numbers of ranks ({differences})")
    nproc = launch.nproc
    overruled = [
        node for node in nodes if nproc is not None and node.node.slots not in (None, nproc)
    ]
    if overruled:
        which = listed_ranks(overruled[0].node)
        notes.append(f"{nproc_option(launch)} wins over {which} ({node_names(overruled)})")
    versions = {node.facts.torch for node in nodes}
    if len(versions) > 1:
        differences = ", ".join(f"{node.name}: {node.facts.torch}" for node in nodes)
        notes.append(f"WARNING: nodes have different versions of torch ({differences})")
    return notes


def resolve_name(kind: str, target: Target, facts: Facts) -> str:
    if kind == "engine":
        # The name may also be another module of this package.
        return target.name or ENGINE
    return facts.target_name if kind in ("program", "script") else target.name


def devices_of_launch(
    node: ProbedNode, config: Config, ranks: int, user_env: Sequence[EnvSetting]
) -> DeviceRequest | None:
    """Return the GPUs or slots that a launch requests on a node, None with --claim none."""
    launch = config.launch
    if launch.claim == "none":
        return None
    env = {**config.env, **{setting.name: setting.value for setting in user_env}}
    return DeviceRequest(
        job=launch.name,
        gpus=launch.gpus,
        visible=next((env[name] for name in VISIBLE if env.get(name)), ""),
        slots=ranks,
        of=max(ranks, node.node.slots or 0),
        needed=bool(node.facts.gpus or launch.gpus) or launch.claim == "all" or launch.queue,
    )


# -- one node ---------------------------------------------------------------------------------


def plan_node(
    request: LaunchRequest,
    layout: Layout,
    index: int,
    probed: ProbedNode,
    address: NodeAddress,
    computed: Sequence[EnvSetting],
) -> NodePlan:
    facts, kind = probed.facts, layout.kind
    target = Target(kind, resolve_name(kind, request.target, facts), request.target.args)
    workdir, count = facts.workdir if facts.workdir_exists else "/", layout.counts[index]
    options = (f"--nproc-per-node={count}", f"--local-addr={address.address}")
    place: tuple[str, ...] = (f"--nnodes={len(layout.counts)}", f"--node-rank={index}")
    place = (*place, f"--master-addr={layout.master}", f"--master-port={layout.port}")
    program = program_words(target, workdir, facts.library)
    torchrun: tuple[str, ...] = (facts.python, "-u", "-m", "torch.distributed.run")
    agent, paste = (*torchrun, *options), (*torchrun, *place, *options, *program)
    if layout.start == "fork":
        fork = ("--run-path", "--start-method=fork")
        agent = (facts.python, "-u", posixpath.join(facts.library, AGENT), *options, *fork)
        # Torchrun itself cannot fork a module.
        if kind != "module":
            paste = (*torchrun, *place, *options, *fork, *program)
    elif request.config.launch.no_torchrun:
        agent = (facts.python, "-u", posixpath.join(facts.library, NO_TORCHRUN), *options)
        meet = (f"MASTER_ADDR={layout.master}", f"MASTER_PORT={layout.port}")
        size = (f"RANK={index}", f"WORLD_SIZE={len(layout.counts)}")
        python = () if kind == "program" else (facts.python, "-u")
        paste = ("env", *meet, *size, *python, *own_words(target, workdir, facts.library))
    return NodePlan(
        index=index,
        node=probed.node,
        address=address.address,
        first_rank=layout.first_rank(index),
        nproc=count,
        nproc_why=layout.whys[index],
        python=facts.python,
        workdir=workdir,
        target=target,
        settings=(*computed, *settings_of(request, layout, index, probed, address)),
        agent=agent,
        way=probed.way,
        placed=OF_TORCHRUN,
        program=program,
        paste=paste,
        library=facts.library,
        runs=facts.runs,
        devices=devices_of_launch(probed, request.config, count, request.env),
    )


def settings_of(
    request: LaunchRequest, layout: Layout, index: int, probed: ProbedNode, address: NodeAddress
) -> Iterator[EnvSetting]:
    """Yield the rank's environment beyond the network settings; later ones win."""
    count = layout.counts[index]
    if layout.start == "fork":
        reason = "counting GPUs must not initialise CUDA before the fork"
        yield EnvSetting("PYTORCH_NVML_BASED_CUDA_CHECK", "1", reason)
    if count > 1 and probed.facts.omp_num_threads is None:
        yield EnvSetting("OMP_NUM_THREADS", "1", "torchrun's default for several ranks")
    for why, variables in (
        ("config nccl:", request.config.nccl.variables),
        ("config env:", request.config.env),
    ):
        for name, value in variables.items():
            yield EnvSetting(name, value, why, yours=True)
    yield from request.env
    identity = {
        "NODE_RANK": str(index),
        "NODE_IP": address.address,
        "NNODES": str(len(layout.counts)),
        "NPROC_PER_NODE": str(count),
        "ORCHESTRATOR_JOB": layout.job,
        "ORCHESTRATOR_EXPERIMENT": layout.experiment,
    }
    for name, value in identity.items():
        yield EnvSetting(name, value, "identifies the node")


def script_path(target: Target, workdir: str, library: str) -> str:
    if target.kind == "engine":
        return posixpath.join(library, *target.name.split(".")) + ".py"
    return posixpath.join(workdir, target.name)


def own_words(target: Target, workdir: str, library: str) -> tuple[str, ...]:
    """Return the words of the program and its arguments for a shell or Python."""
    if target.kind == "module":
        return ("-m", target.name, *target.args)
    name = target.name if target.kind == "program" else script_path(target, workdir, library)
    return (name, *target.args)


def program_words(target: Target, workdir: str, library: str) -> tuple[str, ...]:
    """Return the words of the program and its arguments for torchrun."""
    words = own_words(target, workdir, library)
    # Torchrun's parser removes the first "--", so a program's own "--" needs one before it.
    mark = ("--",) if target.args[:1] == ("--",) else ()
    if target.kind == "module":
        return ("-m", *mark, *words[1:])
    return (*["--no-python"] * (target.kind == "program"), *mark, *words)
