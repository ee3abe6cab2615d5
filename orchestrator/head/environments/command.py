"""`orchestrator bootstrap`: make the same virtual environment on every node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_NODE, UsageError
from orchestrator.common.text import plural, size
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.head.connect import fleet
from orchestrator.head.environments import build, requirements
from orchestrator.head.environments.build import Outcome, Wanted
from orchestrator.head.nodes import environment
from orchestrator.head.nodes.facts import by_value
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.screen import output
from orchestrator.head.screen.output import complain, say, write_out
from orchestrator.head.start.nodes import Nodes, settled, try_all
from orchestrator.head.start.request import resolve
from orchestrator.protocol.requests.environments import PruneEnvironments
from orchestrator.protocol.timing import FILES_ANSWER_SECONDS
from orchestrator.records.machines import machine_of

USUAL = "~/.orchestrator/environments"


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    words: tuple[str, ...]  # packages, or a file
    into: str = ""
    name: str = ""
    find_links: tuple[str, ...] = ()
    index: bool = True
    prune: bool = False


def bootstrap(arguments: LaunchArguments, asked: Asked) -> int:
    """Make the environment on all nodes that can be reached, and name the others."""
    if asked.into and not asked.into.startswith(("/", "~/")):
        raise UsageError(
            f"--into {asked.into}: it is a directory of the nodes", "write --into /path"
        )
    only_prune = asked.prune and not asked.words
    wanted = None if only_prune else wanted_of(asked)
    nodes = try_all(resolve(arguments), without_environment)
    outcomes = [Outcome(n.name, problem=str(error), lost=True) for n, error in nodes.lost]
    if wanted is not None:
        hear = complain if output.as_json() else output.on_the_screen
        with output.heard_by(hear):
            made = build.make(nodes.reached, wanted)
            remember(nodes, made)
        outcomes = [*made, *outcomes]
    freed = pruned(nodes, asked.into) if asked.prune else 0
    differ = build.differences(outcomes)
    if output.as_json():
        data = {"nodes": [asdict(o) for o in outcomes], "differences": differ}
        data |= {"freed": freed}
        write_out(json.dumps(data, indent=1))
    else:
        show(outcomes, differ, asked)
        if asked.prune:
            say(f"removed old environments: {size(freed)}")
    if any(outcome.lost for outcome in outcomes):
        return EXIT_NODE
    return EXIT_CHECK if differ or any(outcome.problem for outcome in outcomes) else EXIT_DONE


def wanted_of(asked: Asked) -> Wanted:
    sources = requirements.read(asked.words, asked.find_links, index=asked.index)
    return Wanted(sources, asked.into, asked.name)


def without_environment(node: Node, launch: Launch) -> Node:
    """Reach a node by its own Python: what this command makes need not be there yet."""
    node = settled(node, launch)
    ours = (node.activate or "").startswith(("bootstrap", "venv:"))
    return replace(node, activate=None) if ours else node


def remember(nodes: Nodes, made: Sequence[Outcome]) -> None:
    """Let launches here use the environment where a node's own Python has no torch."""
    new, with_torch, useless = {}, [], False
    given = {node.name: node for node in nodes.source.nodes}
    for reached, outcome in zip(nodes.reached, made, strict=True):
        node, torch = given[outcome.node], reached.facts.torch
        if torch:
            with_torch.append(machine_of(node))
        elif "torch" not in outcome.packages:
            useless |= not outcome.problem
        elif not (node.python or node.activate or node.wrap):
            new[machine_of(node)] = f"venv:{usual(outcome.path)}"
    environment.remember(new, tuple(with_torch))
    if new:
        say(
            "launches from any directory use it without --activate, as these nodes have no other"
            " torch (--activate none: the login's own Python)"
        )
    if useless:
        say(
            "no launch can run in it: it has no torch, and these nodes have none of their own; name"
            " all packages at once: orchestrator bootstrap torch ..."
        )


def pruned(nodes: Nodes, root: str) -> int:
    """Remove old environments on all nodes; return how many bytes went."""
    requests = [PruneEnvironments(root=root)] * len(nodes.reached)
    answers = fleet.ask_all(nodes.reached, requests, FILES_ANSWER_SECONDS, "")
    return sum(answer.freed for answer in answers)


def show(outcomes: Sequence[Outcome], differ: Sequence[str], asked: Asked) -> None:
    """Print each node's environment, what differs, and how to use it."""
    for outcome in outcomes:
        if outcome.problem:
            complain(f"{outcome.node}: {outcome.problem}")
        else:
            how = f"made in {outcome.seconds:.1f} s" if outcome.made else "whole, nothing to do"
            say(f"{outcome.node}: {plural(len(outcome.packages), 'package')}, {how}")
    if any(outcome.problem for outcome in outcomes):
        complain("then type the same command again: what is whole stays as it is")
    if differ:
        complain("the nodes differ:\n  " + "\n  ".join(differ))
    whole = [outcome for outcome in outcomes if not outcome.problem]
    if whole and len(whole) == len(outcomes) and not differ:
        for line in how_to_activate(whole):
            say(f"in the node list{line}")
        if not asked.into:
            say(f"or for all nodes: --activate bootstrap{':' if asked.name else ''}{asked.name}")


def how_to_activate(whole: Sequence[Outcome]) -> list[str]:
    """Say what goes into the node list, and after which nodes where it is not the same for all."""
    nodes = by_value((outcome.node, usual(outcome.path)) for outcome in whole)
    after = {
        path: f", after {', '.join(names)}" * (len(nodes) > 1) for path, names in nodes.items()
    }
    return [f"{after[path]}: activate=venv:{path}" for path in nodes]


def usual(path: str) -> str:
    """Write a path that is below the home directory of any login as ~/..."""
    directory, _, key = path.rpartition("/")
    return f"{USUAL}/{key}" if directory.endswith(USUAL[1:]) else path
