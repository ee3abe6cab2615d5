"""`orchestrator bootstrap`: makes the same virtual environment on every node.

A complete environment stays as it is; the other nodes get the wheels for their kind.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from orchestrator.common.errors import (
    EXIT_CHECK,
    EXIT_DONE,
    EXIT_NODE,
    CheckFailed,
    NodeError,
    OrchestratorError,
)
from orchestrator.common.text import format_bytes, plural
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.environments import wheels
from orchestrator.head.environments.wheels import Kind, Requirements
from orchestrator.head.nodes import activations
from orchestrator.head.nodes.facts import nodes_by_value
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import output
from orchestrator.head.screen.events import say
from orchestrator.head.screen.output import complain
from orchestrator.head.screen.progress import ProgressBar, counted_work
from orchestrator.head.start.nodes import Nodes, settle_node, try_nodes
from orchestrator.head.start.request import resolve_request
from orchestrator.head.transfer.send import first_failed_path, send_to_all
from orchestrator.head.transfer.tree import tree_of_files
from orchestrator.protocol.requests.environments import (
    AskBuild,
    BuildEnvironment,
    BuildProgress,
    EnvironmentState,
    LookAtEnvironment,
)
from orchestrator.protocol.requests.transfer import STORE, RemoteDir
from orchestrator.protocol.timing import ANSWER_SECONDS, WORK_ANSWER_SECONDS

USUAL = "~/.orchestrator/environments"
POLL_SECONDS = 0.2
LIBC = r"glibc [0-9]{1,3}\.[0-9]{1,3}|musl"
# The key of no environment: the request reads only the kind of the machine.
NO_KEY = "0" * 16


@dataclass(frozen=True)
class BuildOutcome:
    """The environment on one node, or the reason why there is none."""

    node: str
    path: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    # True if it was made by this call; False if it existed.
    made: bool = False
    seconds: float = 0.0
    problem: str = ""
    lost: bool = False


def bootstrap_nodes(
    arguments: LaunchArguments,
    words: Sequence[str],
    *,
    name: str,
    find_links: Sequence[str],
    index: bool,
) -> int:
    """Build the environment on all reachable nodes, report the others; return the exit code."""
    sources = wheels.read_requirements(words, find_links, index=index)
    nodes = try_nodes(resolve_request(arguments), without_environment)
    made = make_environments(nodes.reached, sources, name)
    remember_environment(nodes, made)
    lost = [BuildOutcome(node.name, problem=str(error), lost=True) for node, error in nodes.lost]
    outcomes = [*made, *lost]
    show_outcomes(outcomes, name)
    output.print_result({"nodes": [asdict(outcome) for outcome in outcomes]})
    if any(outcome.lost for outcome in outcomes):
        return EXIT_NODE
    return EXIT_CHECK if any(outcome.problem for outcome in outcomes) else EXIT_DONE


def without_environment(node: Node, launch: Launch) -> Node:
    """Return a node without its venv or bootstrap activation, which may not exist yet."""
    node = settle_node(node, launch)
    ours = (node.activate or "").startswith(("bootstrap", "venv:"))
    return replace(node, activate=None) if ours else node


def remember_environment(nodes: Nodes, made: Sequence[BuildOutcome]) -> None:
    """Save the environment as default for nodes whose own Python has no torch."""
    new, without_torch = {}, False
    given = {node.name: node for node in nodes.source.nodes}
    for reached, outcome in zip(nodes.reached, made, strict=True):
        node = given[outcome.node]
        if reached.facts.torch or outcome.problem:
            continue
        if "torch" not in outcome.packages:
            without_torch = True
        elif all(way is None for way in (node.python, node.activate, node.wrap)):
            new[activations.machine_of(node)] = f"venv:{short_home_path(outcome.path)}"
    if new:
        activations.remember_activations(new)
        say(
            "launches from any directory use it without --activate, as these nodes have no other"
            " torch (--activate none: the login's own Python)"
        )
    if without_torch:
        say(
            "no launch can run in it: it has no torch, and these nodes have none of their own; name"
            " all packages at once: orchestrator bootstrap torch ..."
        )


# -- on the nodes ----------------------------------------------------------------------------------


def make_environments(
    reached: Sequence[Reached], sources: Requirements, name: str = ""
) -> list[BuildOutcome]:
    """Build the environment on nodes without a complete one; return all outcomes, in order."""
    machines = fleet.ask_nodes(
        reached, [LookAtEnvironment(key=NO_KEY)] * len(reached), ANSWER_SECONDS
    )
    kinds = [
        state if isinstance(state, OrchestratorError) else kind_of(state) for state in machines
    ]
    known = [(node, k) for node, k in zip(reached, kinds, strict=True) if isinstance(k, Kind)]
    looks = [LookAtEnvironment(key=kind.key(sources), name=name) for _, kind in known]
    found = fleet.ask_nodes([node for node, _ in known], looks, ANSWER_SECONDS)
    outcomes = [
        lost_outcome(node, kind)
        for node, kind in zip(reached, kinds, strict=True)
        if isinstance(kind, OrchestratorError)
    ]
    lacking: dict[str, list[tuple[Reached, Kind, str]]] = {}
    for (node, kind), look, state in zip(known, looks, found, strict=True):
        if isinstance(state, OrchestratorError):
            outcomes.append(lost_outcome(node, state))
        elif state.packages is not None:
            outcomes.append(BuildOutcome(node.node.name, state.path, state.packages))
        else:
            lacking.setdefault(look.key, []).append((node, kind, state.path))
    for key, members in lacking.items():
        outcomes += make_alike(members, sources, BuildEnvironment(key=key, tree="", name=name))
    by_name = {outcome.node: outcome for outcome in outcomes}
    return [by_name[node.node.name] for node in reached]


def lost_outcome(node: Reached, error: OrchestratorError) -> BuildOutcome:
    return BuildOutcome(node.node.name, problem=str(error), lost=True)


def kind_of(state: EnvironmentState) -> Kind | NodeError:
    """Return the kind of wheels for a node, or an error for an invalid answer.

    The answer is checked because it becomes part of file names here.
    """
    if not (re.fullmatch(r"\w{1,20}", state.machine) and re.fullmatch(LIBC, state.libc)):
        return NodeError(f"it is a {state.machine[:40]!r} with {state.libc[:40]!r}: none is known")
    return Kind(state.version, state.machine, state.libc)


def make_alike(
    members: Sequence[tuple[Reached, Kind, str]], sources: Requirements, request: BuildEnvironment
) -> list[BuildOutcome]:
    """Build the environment on nodes of one kind, with wheels for the oldest libc among them."""
    began = time.monotonic()
    kind = min((kind for _, kind, _ in members), key=lambda kind: kind.minor)
    nodes = [node for node, _, _ in members]
    with ProgressBar("resolving and downloading"):
        directory = wheels.wheels_for(kind, sources)
    tree = tree_of_files(directory, lambda path: 0o755 if path.name == "uv" else 0o644)
    say(
        f"{plural(len(nodes), 'node')} ({kind}): {plural(tree.files, 'file')},"
        f" {format_bytes(tree.size)}"
    )
    places = [RemoteDir(kind=STORE)] * len(nodes)
    with ProgressBar("sending packages", tree.size * len(nodes)) as progress:
        sent = send_to_all([node.channel for node in nodes], places, tree, progress.add)
    changed = first_failed_path(sent)
    if changed:
        raise CheckFailed(f"{directory / changed} was changed while it was sent")
    arrived = {node.node.name: result for node, result in zip(nodes, sent, strict=True)}

    def build(member: tuple[Reached, Kind, str]) -> BuildOutcome:
        node, _, path = member
        error = arrived[node.node.name]
        if isinstance(error, OrchestratorError):
            raise error
        progress = build_on_node(node, request.replace(tree=tree.digest))
        seconds, packages = time.monotonic() - began, progress.packages or {}
        return BuildOutcome(node.node.name, path, packages, True, seconds, progress.problem)

    with counted_work("installing", build, members) as counting:
        results = fleet.map_parallel(members, counting)
    return [
        lost_outcome(node, result) if isinstance(result, OrchestratorError) else result
        for node, result in zip(nodes, results, strict=True)
    ]


def build_on_node(node: Reached, request: BuildEnvironment) -> BuildProgress:
    """Start the build on a node, wait until it is complete or has failed, return its progress."""
    node.channel.ask(request, ANSWER_SECONDS)
    deadline = time.monotonic() + WORK_ANSWER_SECONDS
    shown = ""
    while time.monotonic() < deadline:
        progress = node.channel.ask(AskBuild(), ANSWER_SECONDS)
        if progress.step != shown:
            shown = progress.step
            say(f"{node.node.name}: {shown}")
        if progress.state != "building":
            return progress
        time.sleep(POLL_SECONDS)
    raise NodeError(f"the environment is not ready after {WORK_ANSWER_SECONDS:.0f} s")


# -- output ----------------------------------------------------------------------------------------


def show_outcomes(outcomes: Sequence[BuildOutcome], name: str) -> None:
    """Print each node's outcome, and how to use the environment if all nodes have it."""
    for outcome in outcomes:
        if outcome.problem:
            complain(f"{outcome.node}: {outcome.problem}")
        else:
            how = f"made in {outcome.seconds:.1f} s" if outcome.made else "whole, nothing to do"
            say(f"{outcome.node}: {plural(len(outcome.packages), 'package')}, {how}")
    if any(outcome.problem for outcome in outcomes):
        complain("then type the same command again: what is whole stays as it is")
    elif outcomes:
        for line in how_to_activate(outcomes):
            say(f"in the node list{line}")
        say(f"or for all nodes: --activate bootstrap{':' if name else ''}{name}")


def how_to_activate(whole: Sequence[BuildOutcome]) -> list[str]:
    """Return the option for the node list, for each path with its nodes if paths differ."""
    nodes = nodes_by_value((outcome.node, short_home_path(outcome.path)) for outcome in whole)
    return [
        f", after {', '.join(names)}" * (len(nodes) > 1) + f": activate=venv:{path}"
        for path, names in nodes.items()
    ]


def short_home_path(path: str) -> str:
    """Return the path of an environment as ~/..., if it is in a home directory."""
    directory, _, key = path.rpartition("/")
    return f"{USUAL}/{key}" if directory.endswith(USUAL[1:]) else path
