"""`orchestrator generate accelerate`: a file for each node, for `accelerate launch` by hand."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.errors import EXIT_DONE, UsageError
from orchestrator.head.nodes.node_list import Node, read_nodes
from orchestrator.head.plan.accelerate import (
    Accelerate,
    Machines,
    check_counts,
    name_of,
    read,
    text,
)
from orchestrator.head.plan.plan import DEFAULT_PORT
from orchestrator.head.schedulers import queue
from orchestrator.head.screen.output import write_out


@dataclass(frozen=True)
class FileOptions:
    """The files to write, and their directory."""

    nodes: Path
    nnodes: int | None
    main_process_ip: str | None
    main_process_port: int | None
    nproc: int | None
    accelerate_config: Path | None
    out: Path
    force: bool
    module: bool
    program: tuple[str, ...]


def generate(options: FileOptions) -> int:
    file = options.accelerate_config
    by = read(file) if file else Accelerate()
    nodes = listed(options)
    machines = wanted(options, by, nodes)
    check_counts(by, machines)
    out = options.out
    ranks = range(len(machines.counts))
    paths = [out / name_of(rank) for rank in ranks]
    there = [str(path) for path in paths if path.exists()]
    if there and not options.force:
        raise UsageError(f"{there[0]} is there already", "--force, or another directory: --out DIR")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for rank, path in zip(ranks, paths, strict=True):
            path.write_text(text(by, rank, machines), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written to: {error.strerror}") from error
    program = ["-m"] * options.module + list(options.program or ("train.py",))
    for rank, path in zip(ranks, paths, strict=True):
        name = f": {nodes[rank].name}" if nodes else ""
        command = shlex.join(["accelerate", "launch", "--config_file", str(path), *program])
        write_out(f"# node {rank}{name}\n{command}\n")
    return EXIT_DONE


def listed(options: FileOptions) -> list[Node]:
    """Read the node list, unless the number of nodes was given."""
    if options.nnodes is not None:
        return []
    return [node for node in read_nodes(options.nodes) if not node.spare]


def wanted(options: FileOptions, by: Accelerate, nodes: list[Node]) -> Machines:
    count = len(nodes) or options.nnodes or 0
    ip = options.main_process_ip or by.keys.get("main_process_ip")
    if not ip and nodes:
        ip = queue.resolved(nodes[0].host) or nodes[0].host
    if not ip and count > 1:
        raise UsageError(
            "where do the nodes meet?", "--main-process-ip ADDRESS, the address of node 0"
        )
    world = by.number("num_processes", 1)
    share = world // count if world and world % count == 0 else None
    slots = [node.slots for node in nodes] or [None] * count
    counts = [options.nproc or of_node or share or 0 for of_node in slots]
    if not all(counts):
        raise UsageError(
            "how many processes are on each node?",
            "--nproc N, or slots=N in the list, or num_processes in accelerate's file",
        )
    port = options.main_process_port or by.number("main_process_port") or DEFAULT_PORT
    return Machines(counts, str(ip or "127.0.0.1"), port)
