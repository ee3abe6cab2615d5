"""Makes the environment on all nodes at once: what is whole stays, the rest gets its wheels."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError
from orchestrator.common.text import plural, size
from orchestrator.head.connect import fleet
from orchestrator.head.connect.reach import Reached
from orchestrator.head.environments import wheels
from orchestrator.head.environments.requirements import Requirements
from orchestrator.head.environments.wheels import Kind
from orchestrator.head.nodes.facts import by_value
from orchestrator.head.screen.output import say
from orchestrator.head.screen.progress import Progress, counted
from orchestrator.head.transfer.send import first_failed, send_to_all
from orchestrator.head.transfer.tree import of_files
from orchestrator.protocol.requests.environments import (
    AskBuild,
    BuildEnvironment,
    BuildProgress,
    EnvironmentState,
    LookAtEnvironment,
)
from orchestrator.protocol.requests.transfer import STORE, Place
from orchestrator.protocol.timing import ANSWER_SECONDS, WORK_ANSWER_SECONDS

POLL_SECONDS = 0.2
LIBC = r"glibc [0-9]{1,3}\.[0-9]{1,3}|musl"
NO_KEY = "0" * 16  # of no environment: what is asked is the machine
TOOLS = frozenset(("pip", "setuptools", "wheel"))  # venv brings them, uv does not


@dataclass(frozen=True)
class Wanted:
    """The environment to make: what is in it, where it is on the nodes, and its name there."""

    sources: Requirements
    root: str = ""
    name: str = ""


@dataclass(frozen=True)
class Outcome:
    """The environment on one node, or why there is none."""

    node: str
    path: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    made: bool = False  # else it was there
    seconds: float = 0.0
    problem: str = ""
    lost: bool = False


def make(reached: Sequence[Reached], wanted: Wanted) -> list[Outcome]:
    """Make the environment where it is not whole; return each node's outcome, in order."""
    began = time.monotonic()
    states = fleet.ask(reached, [LookAtEnvironment(key=NO_KEY)] * len(reached), ANSWER_SECONDS)
    kinds = [state if isinstance(state, OrchestratorError) else kind_of(state) for state in states]
    pairs = zip(reached, kinds, strict=True)
    known = [(node, kind) for node, kind in pairs if isinstance(kind, Kind)]
    questions = [
        LookAtEnvironment(key=key_of(wanted, kind), root=wanted.root, name=wanted.name)
        for _, kind in known
    ]
    found = fleet.ask([node for node, _ in known], questions, ANSWER_SECONDS)
    outcomes: dict[str, Outcome] = {}
    todo: dict[str, list[tuple[Reached, Kind, str]]] = {}
    for (node, kind), question, state in zip(known, questions, found, strict=True):
        name = node.node.name
        if isinstance(state, OrchestratorError):
            outcomes[name] = Outcome(name, problem=str(state), lost=True)
        elif state.packages is not None:
            outcomes[name] = Outcome(name, state.path, state.packages)
        else:
            todo.setdefault(question.key, []).append((node, kind, state.path))
    for node, refused in zip(reached, kinds, strict=True):
        if isinstance(refused, OrchestratorError):
            outcomes[node.node.name] = Outcome(node.node.name, problem=str(refused), lost=True)
    for key, members in todo.items():
        for outcome in make_kind(members, key, wanted):
            seconds = time.monotonic() - began
            outcomes[outcome.node] = replace(outcome, seconds=seconds)
    return [outcomes[node.node.name] for node in reached]


def kind_of(state: EnvironmentState) -> Kind | NodeError:
    """Return what wheels fit a node; what it says becomes part of names of files here."""
    if not (re.fullmatch(r"\w{1,20}", state.machine) and re.fullmatch(LIBC, state.libc)):
        return NodeError(f"it is a {state.machine[:40]!r} with {state.libc[:40]!r}: none is known")
    return Kind(state.version, state.machine, state.libc)


def key_of(wanted: Wanted, kind: Kind) -> str:
    return wanted.sources.key(kind.version, kind.machine, kind.libc)


def make_kind(
    members: Sequence[tuple[Reached, Kind, str]], key: str, wanted: Wanted
) -> list[Outcome]:
    """Make it on nodes of one kind: wheels that the oldest libc takes fit all of them."""
    kind = min((kind for _, kind, _ in members), key=lambda kind: kind.minor)
    nodes = [node for node, _, _ in members]
    with Progress("resolving and downloading"):
        directory = wheels.wheels_for(kind, key, wanted.sources)
    tree = of_files(directory, lambda path: 0o755 if path.name == "uv" else 0o644)
    say(f"{plural(len(nodes), 'node')} ({kind}): {plural(tree.files, 'file')}, {size(tree.size)}")
    places = [Place(kind=STORE)] * len(nodes)
    with Progress("sending packages", tree.size * len(nodes)) as progress:
        sent = send_to_all([node.channel for node in nodes], places, tree, progress.add)
    changed = first_failed(sent)
    if changed:
        raise CheckFailed(f"{directory / os.fsdecode(changed)} was changed meanwhile")
    request = BuildEnvironment(key=key, tree=tree.digest, root=wanted.root, name=wanted.name)
    lock = threading.Lock()  # nodes say their steps one at a time

    def told(name: str, step: str) -> None:
        with lock:
            say(f"{name}: {step}")

    def build(pair: tuple[Reached, object, str]) -> Outcome:
        node, arrived, path = pair
        name = node.node.name
        if isinstance(arrived, OrchestratorError):
            raise arrived
        progress = built(node, request, lambda step: told(name, step))
        if progress.state != "ready" or progress.packages is None:
            return Outcome(name, path, problem=progress.problem, made=True)
        return Outcome(name, path, progress.packages, made=True)

    pairs = [(n, s, path) for (n, _, path), s in zip(members, sent, strict=True)]
    with counted("installing", build, pairs) as counting:
        results = fleet.everywhere(pairs, counting)
    return [
        Outcome(node.node.name, problem=str(result), lost=True)
        if isinstance(result, OrchestratorError)
        else result
        for node, result in zip(nodes, results, strict=True)
    ]


def built(node: Reached, request: BuildEnvironment, step: Callable[[str], None]) -> BuildProgress:
    """Begin to make the environment on a node, and wait until it is whole or has failed."""
    node.channel.ask(request, ANSWER_SECONDS)
    deadline = time.monotonic() + WORK_ANSWER_SECONDS
    shown = ""
    while time.monotonic() < deadline:
        progress = node.channel.ask(AskBuild(), ANSWER_SECONDS)
        if progress.step != shown:
            shown = progress.step
            step(shown)
        if progress.state != "building":
            return progress
        time.sleep(POLL_SECONDS)
    raise NodeError(f"the environment is not ready after {WORK_ANSWER_SECONDS:.0f} s")


def differences(outcomes: Sequence[Outcome]) -> list[str]:
    """Name the packages that are not the same on all nodes."""
    whole = [outcome for outcome in outcomes if not outcome.problem]
    found = []
    for package in sorted({name for outcome in whole for name in outcome.packages}):
        versions = by_value((outcome.node, outcome.packages.get(package, "")) for outcome in whole)
        if len(versions) > 1 and not (package in TOOLS and "" in versions):
            parts = [f"{v or 'none'} on {', '.join(nodes)}" for v, nodes in versions.items()]
            found.append(f"{package}: {'; '.join(parts)}")
    return found
