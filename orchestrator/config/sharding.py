"""Decides whether a config's sharding fits the ranks: the head asks before a start, the engine too.

Pure: the head knows how many ranks and GPUs each node has, and must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.common.errors import CheckFailed
from orchestrator.config.schema import COPIED, Config


def check_layout(config: Config, counts: Sequence[int]) -> None:
    """Raise an error if the sharding does not fit nodes with these numbers of ranks."""
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    if config.fsdp.sharding_strategy == "hybrid_shard" and len(nodes) > 1:
        group_size(nodes, config.fsdp.shard_size)


def check_without_gpu(config: Config, node: str, ranks: int) -> None:
    """Refuse what needs a GPU on a node that has none; `ranks` is the number of all ranks."""
    if config.distributed.backend == "nccl":
        raise CheckFailed(
            f"distributed.backend is nccl, but {node} has no GPU", "leave it out, or set it to gloo"
        )
    if config.fsdp.sharding_strategy not in COPIED and ranks > 1:
        check_offload(config, f" on {node}")


def check_offload(config: Config, where: str = "") -> None:
    if config.fsdp.cpu_offload:
        raise CheckFailed(
            f"fsdp.cpu_offload is set, but there is no GPU to offload from{where}",
            "leave fsdp.cpu_offload out",
        )


def group_size(nodes: Sequence[int], wanted: int | None) -> int:
    """Return how many ranks share one copy: those of a node, or as many as the config wants.

    `nodes` has the node of every rank. A group must not end in the middle of a node and go on in
    the next: every gather of its parameters would cross the slow links without anybody asking.
    """
    counts = [nodes.count(node) for node in sorted(set(nodes))]
    size = wanted or counts[0]
    fix = "make the nodes equal with slots= in the list, or use fsdp.sharding_strategy=full_shard"
    if wanted is None and len(set(counts)) > 1:
        raise CheckFailed(
            "hybrid_shard keeps one copy per node, so all nodes need the same number of ranks;"
            f" here they have {', '.join(map(str, counts))}",
            f"{fix}, or set fsdp.shard_size to a divisor of all of them",
        )
    if len(nodes) % size:
        raise CheckFailed(
            f"fsdp.shard_size is {size}, which does not divide the {len(nodes)} ranks", fix
        )
    groups = [nodes[first : first + size] for first in range(0, len(nodes), size)]
    for number, group in enumerate(groups):
        whole = all(list(group).count(node) == nodes.count(node) for node in set(group))
        if len(set(group)) > 1 and not whole:
            first = number * size
            raise CheckFailed(
                f"with fsdp.shard_size {size}, ranks {first} to {first + size - 1} would share one"
                f" copy across the edge between nodes {group[0]} and {group[-1]}",
                "use a divisor of the ranks of each node, or a multiple that covers whole nodes",
            )
    return size
