"""Find the device whose results have other bits than those of its kind, or than its own. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.head.screen.output import PLAIN, Look, paint
from orchestrator.views.verify.diagnosis import Bottleneck

Hashes = Mapping[str, Sequence[int]]  # of one rank: case -> the hashes that were seen


def findings(results: Mapping[str, Any]) -> list[Bottleneck]:
    """Return a finding per device: what does not repeat itself first, then who is odd."""
    node_of, names = places(results)
    hashes: Sequence[Hashes] = results["bits"]["hashes"]
    found = []
    unsteady = set()
    for rank, own in enumerate(hashes):
        cases = [case for case, values in own.items() if len(values) > 1]
        if cases:
            unsteady.add(rank)
            text = f"{who(rank, node_of, names)} does not get the same bits twice: {listed(cases)}"
            found.append(Bottleneck("wrong", text, (node_of[rank],)))
    for kind, ranks in by_kind(results).items():
        steady = [rank for rank in ranks if rank not in unsteady]
        found += odd_ones(kind, steady, hashes, node_of, names)
    return found


def odd_ones(
    kind: str,
    ranks: Sequence[int],
    hashes: Sequence[Hashes],
    node_of: Sequence[int],
    names: Sequence[str],
) -> list[Bottleneck]:
    """Name those outside the majority of a kind; without a majority, all of them together."""
    odd: dict[int, list[str]] = {}
    open_cases = []
    for case in hashes[ranks[0]] if ranks else ():
        values = {rank: hashes[rank][case][0] for rank in ranks}
        ((common, count),) = Counter(values.values()).most_common(1)
        if count == len(ranks):
            continue
        if count * 2 <= len(ranks):
            open_cases.append(case)
            continue
        for rank, value in values.items():
            if value != common:
                odd.setdefault(rank, []).append(case)
    found = [
        Bottleneck(
            "wrong",
            f"{who(rank, node_of, names)} gets other bits than the {len(ranks) - len(odd)} others"
            f" of its kind: {listed(cases)} ({kind})",
            (node_of[rank],),
        )
        for rank, cases in odd.items()
    ]
    if open_cases:
        everyone = ", ".join(who(rank, node_of, names) for rank in ranks[:8])
        text = (
            f"{everyone} get different bits, and no majority says which one is right:"
            f" {listed(open_cases)} ({kind})"
        )
        found.append(Bottleneck("wrong", text, tuple(sorted({node_of[r] for r in ranks}))))
    return found


def to_text(results: Mapping[str, Any], found: Sequence[Bottleneck], look: Look = PLAIN) -> str:
    bits = results["bits"]
    lines = []
    for kind, ranks in by_kind(results).items():
        rounds = [bits["rounds"][rank] for rank in ranks]
        alone = "" if len(ranks) > 1 else "; alone of its kind, it is compared with itself only"
        lines.append(f"{len(ranks)} x {kind}: {min(rounds):,} rounds each at least{alone}")
    lines.append("")
    lines += [paint(f"WRONG: {item.text}", "red", look) for item in found]
    if not found:
        cases = len(bits["hashes"][0])
        lines.append(
            paint(f"all {cases} computations gave the same bits, every time, on every device of a"
                  " kind", "green", look)
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def by_kind(results: Mapping[str, Any]) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {}
    for rank, kind in enumerate(results["bits"]["kinds"]):
        kinds.setdefault(kind, []).append(rank)
    return kinds


def places(results: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    """Return the place of each rank's node in the list, and the nodes' names."""
    nodes = results["nodes"]
    node_of = [0] * sum(len(node["ranks"]) for node in nodes)
    for index, node in enumerate(nodes):
        for rank in node["ranks"]:
            node_of[rank] = index
    return node_of, [f"node {node['index']} ({node['host']})" for node in nodes]


def who(rank: int, node_of: Sequence[int], names: Sequence[str]) -> str:
    return f"the device of rank {rank} on {names[node_of[rank]]}"


def listed(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
    return ", ".join(cases[:3]) + more
