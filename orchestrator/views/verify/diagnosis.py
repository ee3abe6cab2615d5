"""Find the node, link or device that is slow in the measurements of a verify run. Pure.

A pair is as fast as the slower of its two ends lets it be. So what a node can send shows in its
better pairs, a node is slow if even those are, and a link is slow if both of its ends can do more.
How far from the others is too far depends on how far the others are from each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.common import text

Rates = Mapping[tuple[int, int], float]  # (from, to) -> bytes per second

FAR = 0.6  # of the usual: less is slow, if the others agree among themselves
FEW, FAR_OF_FEW = 6, 0.35  # fewer figures than this say little of their spread
ALWAYS = 0.1  # of the usual: less is slow however much the others differ
DEVIATIONS = 6.0
GPU_FAR = 0.85  # two GPUs of one kind differ by some percent
PROMISED = 0.1  # of what the interface says of itself; sockets do not fill the fastest ones,
SOCKETS = 1.25e9  # so no more than this, 10 Gb/s, is expected of any


@dataclass(frozen=True)
class Bottleneck:
    """Something that is wrong or slow; `kind`: wrong, node, link, device."""

    kind: str
    text: str
    nodes: tuple[int, ...] = ()
    rate: float = 0.0
    usual: float = 0.0


def quartile(values: Collection[float]) -> float:
    """Return the upper quartile: a quarter of the values reach it. Of up to three, the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.75 * len(ordered)) - 1]


def noise(values: Collection[float], usual: float) -> float:
    """Return the spread of the values that are not slow, relative to their median."""
    healthy = [value for value in values if value >= FAR_OF_FEW * usual]
    middle = statistics.median(healthy)
    return 1.4826 * statistics.median(abs(value - middle) for value in healthy) / middle


def tolerance(count: int, spread: float, far: float = FAR) -> float:
    """Return the part of the usual value below which one of so many, with this spread, is slow."""
    far = far if count >= FEW else min(far, FAR_OF_FEW)
    return min(far, max(ALWAYS, 1 - DEVIATIONS * spread))


# -- nodes and links ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeRates:
    """The rates that each node can send and receive at, as its better pairs show."""

    out: Mapping[int, float]
    into: Mapping[int, float]
    usual: float
    part: float  # of the usual: less is slow
    slow_out: frozenset[int]
    slow_in: frozenset[int]


def node_rates(rates: Rates) -> NodeRates:
    nodes = sorted({node for pair in rates for node in pair})
    out = {n: quartile([r for (a, _), r in rates.items() if a == n]) for n in nodes}
    into = {n: quartile([r for (_, b), r in rates.items() if b == n]) for n in nodes}
    all_ends = [*out.values(), *into.values()]
    usual = quartile(all_ends)
    part = tolerance(len(rates), noise(rates.values(), usual))
    if len(nodes) < 3:  # whose fault it is cannot be known: it is the link's
        return NodeRates(out, into, usual, part, frozenset(), frozenset())
    least = part * usual
    slow_out = frozenset(node for node in nodes if out[node] < least)
    slow_in = frozenset(node for node in nodes if into[node] < least)
    return NodeRates(out, into, usual, part, slow_out, slow_in)


def slow_links(rates: Rates, names: Sequence[str]) -> list[Bottleneck]:
    """Return slow nodes first, then slow links that no slow node explains."""
    if any((b, a) not in rates for a, b in rates):
        rates = {pair: rate for pair, rate in rates.items() if pair[::-1] in rates}
    if not rates:
        return []
    by_node = node_rates(rates)
    bottlenecks = [
        slow_node(node, rates, by_node, names)
        for node in sorted(by_node.slow_out | by_node.slow_in)
    ]
    parts = {
        (a, b): rate / (by_node.usual if len(rates) == 2 else min(by_node.out[a], by_node.into[b]))
        for (a, b), rate in rates.items()
    }
    slow = {
        (a, b)
        for (a, b), part in parts.items()
        if part < by_node.part and a not in by_node.slow_out and b not in by_node.slow_in
    }
    both = sorted(pair for pair in slow if pair[0] < pair[1] and pair[::-1] in slow)
    one_way = sorted(pair for pair in slow if pair[::-1] not in slow)
    bottlenecks += [slow_link(pair, rates, by_node.usual, names) for pair in both]
    return bottlenecks + [one_way_link(pair, rates, by_node.usual, names) for pair in one_way]


def slow_node(node: int, rates: Rates, by_node: NodeRates, names: Sequence[str]) -> Bottleneck:
    out, into = by_node.out[node], by_node.into[node]
    usual = f"others {speed(by_node.usual)}"
    if node in by_node.slow_out and node in by_node.slow_in:
        median = statistics.median(rate for pair, rate in rates.items() if node in pair)
        text = f"{names[node]} reaches everyone at {speed(median)}, {usual}"
        return Bottleneck("node", text, (node,), median, by_node.usual)
    if node in by_node.slow_out:
        text = f"{names[node]} sends to everyone at {speed(out)}, {usual}; it receives at"
        return Bottleneck("node", f"{text} {speed(into)}", (node,), out, by_node.usual)
    text = f"{names[node]} receives from everyone at {speed(into)}, {usual}; it sends at"
    return Bottleneck("node", f"{text} {speed(out)}", (node,), into, by_node.usual)


def slow_link(
    pair: tuple[int, int], rates: Rates, usual: float, names: Sequence[str]
) -> Bottleneck:
    a, b = pair
    rate = min(rates[a, b], rates[b, a])
    text = f"the link between {names[a]} and {names[b]} has {speed(rates[a, b])} there and"
    text += f" {speed(rates[b, a])} back, others {speed(usual)}"
    return Bottleneck("link", text, pair, rate, usual)


def one_way_link(
    pair: tuple[int, int], rates: Rates, usual: float, names: Sequence[str]
) -> Bottleneck:
    a, b = pair
    text = f"{names[a]} reaches {names[b]} at {speed(rates[a, b])}; back it is"
    others = "" if len(rates) == 2 else f", others {speed(usual)}"
    text = f"{text} {speed(rates[b, a])}{others}"
    return Bottleneck("link", text, pair, rates[a, b], usual)


def below_promise(
    rates: Rates, promised: Sequence[float | None], names: Sequence[str]
) -> list[Bottleneck]:
    """Compare with the speed of the interfaces, for when no other node is faster."""
    known = [rate for rate in promised if rate]
    if not rates or len(known) < len(promised):
        return []
    usual = quartile(rates.values())
    if usual >= PROMISED * min(*known, SOCKETS):
        return []
    who = "all nodes" if len(names) > 2 else " and ".join(names)
    text = f"{who} reach each other at {speed(usual)}; their interfaces say {speed(min(known))}"
    return [Bottleneck("link", text, tuple(range(len(names))), usual, min(known))]


# -- devices and results --------------------------------------------------------------------------


def slow_devices(
    flops: Sequence[float], devices: Sequence[str], node_of: Sequence[int], names: Sequence[str]
) -> list[Bottleneck]:
    """Return the ranks that compute slower than others with the same kind of device."""
    bottlenecks = []
    for kind in sorted(set(devices)):
        rates_of_kind = {rank: flops[rank] for rank, its in enumerate(devices) if its == kind}
        usual = quartile(rates_of_kind.values())
        far = FAR if kind == "CPU" else GPU_FAR
        least = usual * tolerance(len(rates_of_kind), noise(rates_of_kind.values(), usual), far)
        for rank, rate in rates_of_kind.items():
            if rate < least:
                node = node_of[rank]
                text = f"rank {rank} on {names[node]} multiplies at {operations(rate)}, others"
                text = f"{text} {operations(usual)} ({kind})"
                bottlenecks.append(Bottleneck("device", text, (node,), rate, usual))
    return bottlenecks


def wrong_results(
    wrong: Sequence[Mapping[str, Any]], node_of: Sequence[int], names: Sequence[str]
) -> list[Bottleneck]:
    """Return the smallest wrong size of each collective on each rank: larger ones repeat it."""
    first: dict[tuple[str, int], Mapping[str, Any]] = {}
    for error in sorted(wrong, key=lambda error: int(error["bytes"])):
        first.setdefault((error["collective"], error["rank"]), error)
    return [
        Bottleneck(
            "wrong",
            f"{error['collective']} of {size(error['bytes'])} gave rank {error['rank']} on"
            f" {names[node_of[error['rank']]]} a wrong result: element {error['element']} is"
            f" {error['got']:g}, not {error['expected']:g}",
            (node_of[error["rank"]],),
        )
        for error in first.values()
    ]


def places(results: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    """Return the place of each rank's node in the list, and the nodes' names."""
    nodes = results["nodes"]
    node_of = [0] * sum(len(node["ranks"]) for node in nodes)
    for index, node in enumerate(nodes):
        for rank in node["ranks"]:
            node_of[rank] = index
    return node_of, [f"node {node['index']} ({node['host']})" for node in nodes]


def all_of(results: Mapping[str, Any]) -> list[Bottleneck]:
    """Return all bottlenecks in the results that a verify run wrote."""
    node_of, names = places(results)
    rates = {(row["from"], row["to"]): float(row["rate"]) for row in results.get("pairs", [])}
    bottlenecks = wrong_results(results.get("wrong", []), node_of, names)
    bottlenecks += slow_links(rates, names)
    if results["backend"] == "gloo":
        bottlenecks += below_promise(
            rates, [node["link_speed"] for node in results["nodes"]], names
        )
    return bottlenecks + slow_devices(results["flops"], results["devices"], node_of, names)


# -- words ----------------------------------------------------------------------------------------


def speed(rate: float) -> str:
    """Write a rate in bytes per second as bits per second, as networks are sold."""
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e8 else f"{bits / 1e6:.3g} Mb/s"


def operations(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP/s"


def size(count: float) -> str:
    """Write a number of bytes in powers of two, as the sizes of the measurement are."""
    return text.size(count, binary=True)
