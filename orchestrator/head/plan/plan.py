"""Nodes + facts + config -> exactly what each node will run. Pure; --dry-run prints it."""

from __future__ import annotations

import dataclasses
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.errors import CheckFailed
from orchestrator.head.inventory.facts import Facts
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.plan import nccl_env
from orchestrator.head.plan.addresses import Place
from orchestrator.head.plan.member import Member
from orchestrator.head.plan.nccl_env import Network
from orchestrator.head.plan.setting import Setting

DEFAULT_PORT = 29500
OLDEST_FORK = (2, 1)  # before it, torchrun's agent initialised CUDA when it counted devices
AGENT = "orchestrator/node/job/fast_torchrun.py"  # torchrun, sooner ready
ENGINE = "orchestrator.engine.train"  # travels with what is shipped to every node


@dataclass(frozen=True)
class Target:
    """What the user asked to run. Kind: "engine", "module", or "auto" for a file or program."""

    kind: str
    name: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """One node as it was found."""

    node: Node
    facts: Facts
    reached: str  # the IP address by which the head reached it, "" behind a jump host


@dataclass(frozen=True)
class NodePlan:
    """What one node runs."""

    index: int
    node: Node
    address: str
    first_rank: int
    nproc: int
    nproc_why: str
    python: str
    workdir: str
    target: Target  # kind: "engine", "script", "module" or "program"
    settings: tuple[Setting, ...]  # in order; later ones win
    agent: tuple[str, ...]  # torchrun, as the supervisor starts it, up to the program
    library: str = ""  # where our program lies on the node
    unset: tuple[str, ...] = ()  # what the hook took out of the environment
    paste: tuple[str, ...] = ()  # the same job without a supervisor, for a shell
    files: tuple[tuple[str, str], ...] = ()  # (name, text) that the agent finds where it starts

    @property
    def env(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings}

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.nproc - 1


@dataclass(frozen=True)
class Plan:
    """The whole job."""

    job: str
    start: str  # fork or plain
    master_address: str
    master_port: int
    world_size: int
    nodes: tuple[NodePlan, ...]
    spares: tuple[str, ...]
    notes: tuple[str, ...]  # what was decided for the user, said out loud
    transport: str = "ethernet"  # what NCCL's data travels by: Fabric.kind
    hints: tuple[str, ...] = ()  # for who asks why


def make(
    job: str,
    experiment: str,
    target: Target,
    found: Sequence[Found],
    spares: Sequence[Node],
    config: Config,
    user_env: Mapping[str, str],
    hinted: frozenset[str] = frozenset(),
) -> Plan:
    """Raises CheckFailed where launching would fail or mislead. `hinted`: what the hook names."""
    kind = check_targets(target, found)
    check_torch(found)
    theirs = frozenset({*config.nccl.variables, *config.env, *user_env})
    net = nccl_env.make(members(found), config.nccl.profile, theirs, hinted)
    places = net.places
    start, notes = choose_start(config.launch.start, kind, target, found)
    port, port_note = choose_port(config, found[0])
    counts = [count_ranks(one, config.launch.nproc) for one in found]
    world = sum(count for count, _ in counts)
    draft = Draft(
        job, experiment, start, places[0].address, port, len(found), config, user_env, net
    )
    nodes = []
    first = 0
    for index, (one, place, (count, why)) in enumerate(zip(found, places, counts, strict=True)):
        resolved = Target(kind, resolve_name(kind, target, one.facts), target.args)
        nodes.append(draft.node(index, one, place, first, count, why, resolved))
        first += count
    return Plan(
        job=job,
        start=start,
        master_address=places[0].address,
        master_port=port,
        world_size=world,
        nodes=tuple(nodes),
        spares=tuple(node.name for node in spares),
        notes=(*notes, *port_note, *uneven_notes(found, counts, config.launch.nproc), *net.notes),
        transport=net.fabric.kind,
        hints=net.hints,
    )


def members(found: Sequence[Found]) -> list[Member]:
    return [Member(one.node.name, one.facts, one.reached, one.node.ifname) for one in found]


# -- decisions --------------------------------------------------------------------------------


def check_targets(target: Target, found: Sequence[Found]) -> str:
    """The kind that all nodes agree on; a node without the program is told now, not by torchrun."""
    if target.kind == "engine":
        return "engine"
    problems = []
    for one in found:
        where, facts = one.node.name, one.facts
        if not facts.workdir_exists:
            problems.append(f"{where}: there is no directory {facts.workdir}")
        elif facts.target_kind == "missing":
            problems.append(f"{where}: there is no {facts.target_name}")
        elif facts.target_kind in ("unreadable", "not executable"):
            problems.append(f"{where}: {facts.target_name} is {facts.target_kind}")
    if problems:
        raise CheckFailed(
            "the program is not ready on every node:\n    " + "\n    ".join(problems),
            "copy it to the same path there, or name its directory with --workdir DIR, "
            "or per node with workdir=DIR in the list",
        )
    kinds = {one.facts.target_kind for one in found}
    if len(kinds) > 1:
        words = "; ".join(f"{one.node.name}: {one.facts.target_kind}" for one in found)
        raise CheckFailed(f"{target.name} is not the same on all nodes ({words})")
    return kinds.pop()


def check_torch(found: Sequence[Found]) -> None:
    without = [one for one in found if not one.facts.torch]
    if without:
        raise CheckFailed(
            "there is no torch on: "
            + ", ".join(f"{one.node.name} ({one.facts.python})" for one in without),
            "name a Python that has it: --python /path/to/python, or python=/path in the list",
        )


def choose_start(
    wanted: str, kind: str, target: Target, found: Sequence[Found]
) -> tuple[str, list[str]]:
    """fork where it is safe, else plain, and why."""
    if wanted == "plain":
        return "plain", []
    if kind == "module":
        return "plain", [f"plain start: torchrun cannot fork a module (-m {target.name})"]
    if kind == "program":
        return "plain", [f"plain start: {target.name} is not a Python program"]
    for one in found:
        if torch_release(one.facts.torch) < OLDEST_FORK:
            return "plain", [f"plain start: torch {one.facts.torch} on {one.node.name} is too old"]
    return "fork", []


def torch_release(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else (0, 0)


def choose_port(config: Config, master: Found) -> tuple[int, list[str]]:
    wanted = config.launch.master_port
    port = master.facts.port or 0
    if not port:
        which = f"port {wanted}" if wanted else f"no port from {DEFAULT_PORT} on"
        taken = "is taken" if wanted else "is free"
        raise CheckFailed(
            f"{which} {taken} on the master {master.node.name}",
            "leave the port out and a free one is found, or name another with --master-port",
        )
    if wanted is None and port != DEFAULT_PORT:
        return port, [f"port {DEFAULT_PORT} is taken on {master.node.name}: using {port}"]
    return port, []


def count_ranks(found: Found, nproc: int | None) -> tuple[int, str]:
    if found.node.slots is not None:
        why = "slots= in the list" if found.node.line else "--ntasks-per-node"
        return found.node.slots, why
    if nproc is not None:
        return nproc, "--nproc"
    if found.facts.gpus:
        return found.facts.gpus, f"{found.facts.gpus} GPUs found"
    return 1, "no GPU found"


def uneven_notes(
    found: Sequence[Found], counts: Sequence[tuple[int, str]], nproc: int | None
) -> list[str]:
    notes = []
    if len({count for count, _ in counts}) > 1:
        words = ", ".join(
            f"{one.node.name}: {n}" for one, (n, _) in zip(found, counts, strict=True)
        )
        notes.append(f"nodes have different numbers of ranks ({words})")
    for one, (count, why) in zip(found, counts, strict=True):
        if nproc is not None and count != nproc:
            notes.append(f"{one.node.name} runs {count} ranks by {why}, not --nproc {nproc}")
    versions = {one.facts.torch for one in found}
    if len(versions) > 1:
        words = ", ".join(f"{one.node.name}: {one.facts.torch}" for one in found)
        notes.append(f"WARNING: nodes have different versions of torch ({words})")
    return notes


def resolve_name(kind: str, target: Target, facts: Facts) -> str:
    if kind == "engine":
        return target.name or ENGINE  # or another program of ours
    return facts.target_name if kind == "program" else target.name


# -- one node ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """What is the same for all nodes."""

    job: str
    experiment: str
    start: str
    master_address: str
    port: int
    nnodes: int
    config: Config
    user_env: Mapping[str, str]
    network: Network

    def node(
        self,
        index: int,
        found: Found,
        place: Place,
        first: int,
        count: int,
        why: str,
        target: Target,
    ) -> NodePlan:
        facts = found.facts
        workdir = facts.workdir if facts.workdir_exists else "/"
        options: tuple[str, ...] = (
            *(f"--nnodes={self.nnodes}", f"--node-rank={index}", f"--nproc-per-node={count}"),
            *(f"--master-addr={self.master_address}", f"--master-port={self.port}"),
            f"--local-addr={place.address}",
        )
        torchrun: tuple[str, ...] = (facts.python, "-u", "-m", "torch.distributed.run")
        agent = torchrun
        if self.start == "fork":
            options += ("--run-path", "--start-method=fork")
            agent = (facts.python, "-u", posixpath.join(facts.library, AGENT))
        return NodePlan(
            index=index,
            node=found.node,
            address=place.address,
            first_rank=first,
            nproc=count,
            nproc_why=why,
            python=facts.python,
            workdir=workdir,
            target=target,
            settings=self.settings(index, facts, place, count),
            agent=(*agent, *options),
            paste=(*torchrun, *options, *program_words(target, workdir, facts.library)),
            library=facts.library,
        )

    def settings(self, index: int, facts: Facts, place: Place, count: int) -> tuple[Setting, ...]:
        chosen = list(self.network.settings[index])
        if self.start == "fork":
            reason = "counting GPUs must not initialise CUDA before the fork"
            chosen.append(Setting("PYTORCH_NVML_BASED_CUDA_CHECK", "1", reason))
        if count > 1 and facts.omp_num_threads is None:
            chosen.append(Setting("OMP_NUM_THREADS", "1", "torchrun's default for several ranks"))
        for why, variables in (
            ("config nccl:", self.config.nccl.variables),
            ("config env:", self.config.env),
            ("--env", self.user_env),
        ):
            chosen += [Setting(name, value, why, yours=True) for name, value in variables.items()]
        identity = {
            "NODE_RANK": str(index),
            "NODE_IP": place.address,
            "NNODES": str(self.nnodes),
            "NPROC_PER_NODE": str(count),
            "ORCHESTRATOR_JOB": self.job,
            "ORCHESTRATOR_EXPERIMENT": self.experiment,
        }
        chosen += [Setting(name, value, "who it is") for name, value in identity.items()]
        return tuple(chosen)


def script_path(target: Target, workdir: str, library: str) -> str:
    if target.kind == "engine":
        return posixpath.join(library, *target.name.split(".")) + ".py"
    return posixpath.join(workdir, target.name)


def program_words(target: Target, workdir: str, library: str) -> tuple[str, ...]:
    args = target.args
    # torchrun's parser swallows the first "--" that it meets: here it gets one of its own.
    mark = ("--",) if args[:1] == ("--",) else ()
    if target.kind == "module":
        return ("-m", *mark, target.name, *args)
    if target.kind == "program":
        return ("--no-python", *mark, target.name, *args)
    return (*mark, script_path(target, workdir, library), *args)


# -- showing it -------------------------------------------------------------------------------


def shell_lines(plan: Plan, node: NodePlan) -> list[str]:
    """What can be pasted into a shell on the node to run its part by hand."""
    lines = [f"cd {shlex.quote(node.workdir)}"]
    lines += [f"unset {name}" for name in node.unset]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in node.env.items()]
    if plan.start == "fork" or node.target.kind == "engine":
        # --run-path leaves out what `python script.py` does: the script's directory comes first.
        script = script_path(node.target, node.workdir, node.library)
        first = node.library if node.target.kind == "engine" else posixpath.dirname(script)
        lines.append(f'export PYTHONPATH={shlex.quote(first)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    for name, text in node.files:
        lines.append(f"cat > {shlex.quote(name)} <<'END'\n{text}END")
    lines.append(" ".join(map(shlex.quote, node.paste)))
    return lines


def to_text(plan: Plan) -> str:
    blocks = []
    for node in plan.nodes:
        ranks = f"rank {node.first_rank}"
        if node.nproc > 1:
            ranks = f"ranks {node.first_rank}-{node.last_rank}"
        head = f"# node {node.index}: {node.node.name} ({ranks}: {node.nproc_why})"
        blocks.append("\n".join([head, *shell_lines(plan, node)]))
    words = [f"# {len(plan.nodes)} nodes, {plan.world_size} ranks, {plan.start} start"]
    words[0] += f", master {plan.master_address}:{plan.master_port}"
    words += [f"# note: {note}" for note in plan.notes]
    words += [f"# spare: {name}" for name in plan.spares]
    return "\n".join(words) + "\n\n" + "\n\n".join(blocks) + "\n"


def to_json(plan: Plan) -> dict[str, Any]:
    data = dataclasses.asdict(plan)
    for entry, node in zip(data["nodes"], plan.nodes, strict=True):
        entry["env"] = node.env
        entry["command"] = list(node.paste)
        entry["shell"] = "\n".join(shell_lines(plan, node))
        entry["ranks"] = list(range(node.first_rank, node.first_rank + node.nproc))
        del entry["paste"]
    return data
