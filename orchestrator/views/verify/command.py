"""`orchestrator verify`: run the measuring program on all nodes and explain its figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.common import files, text
from orchestrator.common.errors import EXIT_CHECK, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.common.text import format_duration
from orchestrator.config.launch import LaunchArguments
from orchestrator.head.commands import follow
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.events import say
from orchestrator.head.screen.output import PLAIN, Cell, Terminal, format_table, paint_text
from orchestrator.head.start import launch as starting
from orchestrator.head.start.request import LaunchRequest, resolve_request
from orchestrator.protocol.message import parse_object
from orchestrator.protocol.spec import Target
from orchestrator.records.experiment import Experiment

# The module is part of the package that every node receives.
PROGRAM = "orchestrator.engine.verify"
SMALLEST = 1 << 10


@dataclass(frozen=True)
class Measurement:
    """The options of the measurement."""

    backend: str | None
    max_size: str
    seconds: float


def verify(arguments: LaunchArguments, measurement: Measurement, *, strict: bool) -> int:
    request = request_of(arguments, measurement)
    launched = starting.launch(request)
    experiment = launched.experiment
    code = follow.follow_launched(launched, arguments.view)
    measured = read(experiment)
    if measured is None:
        output.print_result({"experiment": str(experiment.path), "exit_code": code})
        return code or EXIT_FAILED
    return conclude(experiment, measured, code, strict=strict)


def request_of(arguments: LaunchArguments, measurement: Measurement) -> LaunchRequest:
    seconds = measurement.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(
            f"--seconds {seconds:g}: write how many seconds it may measure, such as 60"
        )
    largest = text.parse_size("--max-size", measurement.max_size)
    if largest < SMALLEST:
        raise UsageError(f"--max-size {measurement.max_size}: the smallest size measured is 1K")
    request = resolve_request(arguments)
    options = ["--max-size", str(largest), "--seconds", f"{seconds:g}"]
    backend = measurement.backend or request.config.distributed.backend
    options += ["--backend", backend] if backend else []
    launch = replace(request.config.launch, name=arguments.launch.get("name", "verify"))
    return replace(
        request,
        target=Target("engine", PROGRAM, tuple(options)),
        config=replace(request.config, launch=launch),
    )


def read(experiment: Experiment) -> dict[str, Any] | None:
    try:
        return parse_object(files.read_plain(experiment.path / "outputs" / "verify.json"))
    except (OSError, ValueError):
        # The job ended before it measured anything, and has printed why.
        return None


def conclude(experiment: Experiment, measured: dict[str, Any], code: int, *, strict: bool) -> int:
    """Print the findings, write them beside the measurement, and return the exit code."""
    bottlenecks = all_of(measured)
    if any(each.kind == "wrong" for each in bottlenecks) and code != EXIT_STOPPED:
        code = EXIT_FAILED
    elif code == EXIT_DONE and bottlenecks and strict:
        code = EXIT_CHECK
    findings = [asdict(each) for each in bottlenecks]
    about = {"exit_code": code, "experiment": str(experiment.path), "findings": findings}
    whole = {**about, **measured}
    path = experiment.path / "outputs" / "verify.json"
    files.replace_file(path, f"{json.dumps(whole, indent=1)}\n")
    output.print_result(whole, lambda terminal: f"\n{to_text(measured, bottlenecks, terminal)}")
    say(f"kept in {path}")
    return code


# -- the report -------------------------------------------------------------------------------


# The largest number of nodes whose pairs are shown as a matrix.
WIDEST = 12
# Reasons for missing sizes.
ENDED = {
    "time": "larger sizes are left out where their time was up; more with --seconds",
    "memory": "larger sizes are left out: the ranks do not have the memory for them",
}


def to_text(
    results: Mapping[str, Any], findings: Sequence[Bottleneck], terminal: Terminal = PLAIN
) -> str:
    blocks = measured(results, terminal)
    for finding in findings:
        wrong = finding.kind == "wrong"
        words = f"{'WRONG' if wrong else 'SLOW'}: {finding.text}"
        blocks.append(paint_text(words, styles.FAILED if wrong else styles.WARNING, terminal))
    if not results.get("complete", True):
        words = "the run ended before everything was measured"
        blocks.append(paint_text(words, styles.WARNING, terminal))
    elif not findings:
        blocks.append(paint_text(all_well(results), styles.DONE, terminal))
    return "\n\n".join(blocks) + "\n"


def all_well(results: Mapping[str, Any]) -> str:
    if len(results["devices"]) == 1:
        return "one rank alone: there is no link to verify"
    return "every result is right, no node, link or device is slower than the others"


def measured(results: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a table of collectives by size, one of pairs of nodes, and a line for each device."""
    blocks = []
    rows = results.get("collectives", [])
    if timed := {(row["collective"], row["bytes"]): row for row in rows}:
        names = list(dict.fromkeys(name for name, _ in timed))
        lines: list[list[Cell]] = [["", *names]]
        for count in sorted({count for _, count in timed}):
            lines.append([size(count), *(cell(timed.get((name, count))) for name in names)])
        heading = f"among all {rows[0]['ranks']} ranks: time of one call, bus bandwidth in Gb/s"
        blocks.append(f"{heading}\n{figures(lines, terminal)}")
    blocks += [ENDED[reason] for reason in results.get("notes", [])]
    rates = {(r["from"], r["to"]): f"{8e-9 * r['rate']:.3g}" for r in results.get("pairs", [])}
    nodes = sorted({node for pair in rates for node in pair})
    if 0 < len(nodes) <= WIDEST:
        lines = [["", *(f"node {node}" for node in nodes)]]
        lines += [[f"node {a}", *(rates.get((a, b), "-") for b in nodes)] for a in nodes]
        delays = sorted(row["latency"] for row in results["pairs"])
        spread = f"one way {format_duration(delays[0])} to {format_duration(delays[-1])}"
        blocks.append(f"from a node to a node, Gb/s ({spread})\n{figures(lines, terminal)}")
    for kind in sorted(set(results["devices"])):
        pairs = zip(results["flops"], results["devices"], strict=True)
        flops = [rate for rate, its in pairs if its == kind]
        between = f"{operations(min(flops))} to {operations(max(flops))}"
        blocks.append(f"multiplying matrices, {len(flops)} x {kind}: {between}")
    return blocks


def figures(rows: Sequence[Sequence[Cell]], terminal: Terminal) -> str:
    """Return a table of numbers, with headings above and at the left."""
    return format_table(rows, terminal, right=range(1, len(rows[0])), headed=True, indent=2)


def cell(row: Mapping[str, Any] | None) -> str:
    return "-" if row is None else f"{format_duration(row['seconds'])} {8e-9 * row['busbw']:8.3f}"


# -- the diagnosis ----------------------------------------------------------------------------


# From (sender, receiver) to bytes per second.
Rates = Mapping[tuple[int, int], float]

# A rate below this part of the usual one is slow, if the others agree among themselves.
FAR = 0.6
# With fewer than FEW rates the spread is unknown, so the limit is lower.
FEW, FAR_OF_FEW = 6, 0.35
# A rate below this part is slow however much the others differ.
ALWAYS = 0.1
DEVIATIONS = 6.0
# Two GPUs of one kind differ by a few percent.
GPU_FAR = 0.85
# The part of an interface's nominal speed that is expected. Sockets do not fill the fastest
# interfaces, so at most 10 Gb/s is expected.
PROMISED, SOCKETS = 0.1, 1.25e9


@dataclass(frozen=True)
class Bottleneck:
    """Something that is wrong or slow; `kind` is wrong, node, link or device."""

    kind: str
    text: str
    nodes: tuple[int, ...] = ()
    rate: float = 0.0
    usual: float = 0.0


def quartile(values: Collection[float]) -> float:
    """Return the upper quartile; of up to three values, the largest."""
    ordered = sorted(values)
    return ordered[math.ceil(0.75 * len(ordered)) - 1]


def tolerance(values: Collection[float], usual: float, far: float = FAR) -> float:
    """Return the part of the usual value below which one of these values is slow."""
    healthy = [value for value in values if value >= FAR_OF_FEW * usual]
    middle = statistics.median(healthy)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in healthy) / middle
    far = far if len(values) >= FEW else min(far, FAR_OF_FEW)
    return min(far, max(ALWAYS, 1 - DEVIATIONS * spread))


def slow_links(rates: Rates, names: Sequence[str]) -> list[Bottleneck]:
    """Return the slow nodes, then slow links that no slow node explains."""
    rates = {pair: rate for pair, rate in rates.items() if pair[::-1] in rates}
    if not rates:
        return []
    nodes = sorted({node for pair in rates for node in pair})
    out = {n: quartile([r for (a, _), r in rates.items() if a == n]) for n in nodes}
    into = {n: quartile([r for (_, b), r in rates.items() if b == n]) for n in nodes}
    usual = quartile([*out.values(), *into.values()])
    part = tolerance(rates.values(), usual)
    # With two nodes, the slow one cannot be known: the link is reported.
    several = len(nodes) > 2
    slow_out = {node for node in nodes if several and out[node] < part * usual}
    slow_in = {node for node in nodes if several and into[node] < part * usual}
    found = []
    for node in sorted(slow_out | slow_in):
        rate, more = min(out[node], into[node]), ""
        if node in slow_out & slow_in:
            rate, what = (
                statistics.median(r for pair, r in rates.items() if node in pair),
                "reaches",
            )
        elif node in slow_out:
            what, more = "sends to", f"; it receives at {speed(into[node])}"
        else:
            what, more = "receives from", f"; it sends at {speed(out[node])}"
        words = f"{names[node]} {what} everyone at {speed(rate)}, others {speed(usual)}{more}"
        found.append(Bottleneck("node", words, (node,), rate, usual))
    slow = {
        (a, b)
        for (a, b), rate in rates.items()
        if rate < part * (min(out[a], into[b]) if several else usual)
        and a not in slow_out
        and b not in slow_in
    }
    others = f", others {speed(usual)}" if several else ""
    for a, b in sorted(slow):
        there, back = speed(rates[a, b]), speed(rates[b, a])
        if (b, a) not in slow:
            words = f"{names[a]} reaches {names[b]} at {there}; back it is {back}{others}"
        elif a < b:
            words = f"the link between {names[a]} and {names[b]} has {there} there and {back} back"
            words += others
        else:
            continue
        found.append(Bottleneck("link", words, (a, b), rates[a, b], usual))
    return found


def below_promise(
    rates: Rates, promised: Sequence[float | None], names: Sequence[str]
) -> list[Bottleneck]:
    """Compare with the nominal speed of the interfaces, for when no other node is faster."""
    known = [rate for rate in promised if rate]
    if not rates or len(known) < len(promised):
        return []
    usual = quartile(rates.values())
    if usual >= PROMISED * min(*known, SOCKETS):
        return []
    who = "all nodes" if len(names) > 2 else " and ".join(names)
    words = f"{who} reach each other at {speed(usual)}; their interfaces say {speed(min(known))}"
    return [Bottleneck("link", words, tuple(range(len(names))), usual, min(known))]


def slow_devices(
    flops: Sequence[float], devices: Sequence[str], node_of: Sequence[int], names: Sequence[str]
) -> list[Bottleneck]:
    """Return the ranks that compute slower than others with the same kind of device."""
    found = []
    for kind in sorted(set(devices)):
        rates = {rank: flops[rank] for rank, its in enumerate(devices) if its == kind}
        usual = quartile(rates.values())
        least = usual * tolerance(rates.values(), usual, FAR if kind == "CPU" else GPU_FAR)
        for rank, rate in rates.items():
            if rate < least:
                words = f"rank {rank} on {names[node_of[rank]]} multiplies at {operations(rate)}"
                words += f", others {operations(usual)} ({kind})"
                found.append(Bottleneck("device", words, (node_of[rank],), rate, usual))
    return found


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


def all_of(results: Mapping[str, Any]) -> list[Bottleneck]:
    """Return all bottlenecks in the results of a verify run."""
    nodes = results["nodes"]
    places = {rank: index for index, node in enumerate(nodes) for rank in node["ranks"]}
    node_of = [places[rank] for rank in sorted(places)]
    names = [f"node {node['index']} ({node['host']})" for node in nodes]
    rates = {(row["from"], row["to"]): float(row["rate"]) for row in results.get("pairs", [])}
    found = wrong_results(results.get("wrong", []), node_of, names) + slow_links(rates, names)
    if results["backend"] == "gloo":
        found += below_promise(rates, [node["link_speed"] for node in nodes], names)
    return found + slow_devices(results["flops"], results["devices"], node_of, names)


def speed(rate: float) -> str:
    """Format a rate in bytes per second as bits per second."""
    bits = 8 * rate
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e8 else f"{bits / 1e6:.3g} Mb/s"


def operations(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP/s"


def size(count: float) -> str:
    """Format a number of bytes in powers of two, like the sizes of the measurement."""
    return text.format_bytes(count, binary=True)
