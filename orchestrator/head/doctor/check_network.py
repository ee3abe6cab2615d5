"""Checks of the network: interfaces, connections between nodes, misleading names. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from orchestrator.common import text
from orchestrator.common.hosts import is_loopback, join_names
from orchestrator.head.doctor.findings import (
    BAD,
    WARN,
    Case,
    Examined,
    Finding,
    bad_finding,
    unequal_values,
    warn_finding,
)
from orchestrator.head.plan import nccl_transport
from orchestrator.protocol.requests.machine import LARGE_LOST

# Mb/s. At this speed or below, computation rarely hides the communication.
SLOW = 1000
# Mbit of 100 million gradients in fp32.
GRADIENTS = 3200
SLOW_FIX = (
    "use a faster interface (ifname=, or its addresses in the list), or send less often"
    " (training.gradient_accumulation); `orchestrator verify` measures it"
)
TOO_LARGE_FIX = (
    "the network between them takes smaller packets than they send: let the switch take jumbo"
    " frames, or type on them, as root: ip link set INTERFACE mtu 1500 (1280 below a VPN)"
)


def check_net(case: Case) -> Iterator[Finding]:
    """Check the interface of each node towards the master, and compare them."""
    if case.network_error:
        what, fix = case.network_error
        names = tuple(node.name for node, _ in case.seen)
        named = tuple(name for name in names if is_named(name, what))
        yield Finding(BAD, named or names, what, fix)
        return
    for node, link in case.links:
        if link.state not in ("up", "unknown"):
            fix = f"on {node.name}: ip link set {link.name} up"
            yield bad_finding(node, f"{link.name} is {link.state}", fix)
    speeds = {node.name: link.speed for node, link in case.links if link.speed}
    shown = [(name, f"{speed} Mb/s") for name, speed in speeds.items()]
    yield from unequal_values(WARN, "speed of the interface", shown, "ethtool INTERFACE; the cable")
    ports = [
        (node.name, sum(port.active and not port.software for port in facts.rdma))
        for node, facts in case.seen
        if facts.rdma
    ]
    fix = "on these nodes: ibstat, or rdma link"
    yield from unequal_values(WARN, "RDMA ports that are up", ports, fix)
    # Unequal speeds have a finding of their own, above.
    if len(case.seen) > 1 and speeds and max(speeds.values()) <= SLOW and not uses_cards(case):
        speed = min(speeds.values())
        what = f"the nodes meet over {speed / 1000:g} Gb/s (on {join_names(list(speeds))}):"
        what += f" 100 million gradients take {text.format_duration(GRADIENTS / speed)} a step"
        yield Finding(WARN, tuple(speeds), what, SLOW_FIX)


def uses_cards(case: Case) -> bool:
    """Return True if NCCL sends over RDMA cards, which are faster than the link; gloo does not.

    Cards that the user has chosen count as faster if each node has any.
    """
    if not all(facts.gpus for _, facts in case.seen):
        return False
    if case.needs.fabric == "yours":
        return all(any(p.active and not p.software for p in f.rdma) for _, f in case.seen)
    return case.needs.fabric in nccl_transport.LAYERS


def is_named(name: str, sentence: str) -> bool:
    """Return True if a sentence names a node: 10.0.0.1 is not in a sentence about 10.0.0.12."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\d)", sentence) is not None


def check_mtu(case: Case) -> Iterator[Finding]:
    """Compare MTUs, and find nodes that lose large packets between them, on which ranks hang."""
    sizes = {node.name: link.mtu for node, link in case.links}
    fix = "on these nodes, as root: ip link set INTERFACE mtu {most}"
    yield from unequal_values(WARN, "MTU", list(sizes.items()), fix)
    lost = [call for call, reason in case.silent.items() if reason == LARGE_LOST]
    pairs = sorted({(min(a, b), max(a, b)) for a, b, _ in lost})
    if pairs:
        nodes = sorted({name for pair in pairs for name in pair})
        shown = join_names([f"{one} and {other}" for one, other in pairs])
        mtus = ", ".join(f"{sizes[name]} on {name}" for name in nodes[:4] if name in sizes)
        yield Finding(
            BAD, tuple(nodes), f"between {shown} {LARGE_LOST} (MTU {mtus})", TOO_LARGE_FIX
        )


def check_links(case: Case) -> Iterator[Finding]:
    """Find nodes that others cannot reach; a blocked node is one finding, not one per pair."""
    blocked = {call: reason for call, reason in case.silent.items() if reason != LARGE_LOST}
    pairs = {(source, target) for source, target, _ in blocked}
    towards, away = Counter(t for _, t in pairs), Counter(s for s, _ in pairs)
    others = len(case.seen) - 1
    alone = {name for name, count in towards.items() if others > 1 and count == others}
    mute = {name for name, count in away.items() if others > 1 and count == others}
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[int, str]]] = {}
    for (source, target, port), reason in blocked.items():
        what, ends = f"{source} does not reach {target}", [source, target]
        if target in alone:
            what, ends = f"no node reaches {target}", [target]
        elif source in mute:
            what, ends = f"{source} reaches no node", [source]
        groups.setdefault((what, tuple(ends)), []).append((port, reason))
    for (what, nodes), failures in groups.items():
        ports = sorted({port for port, _ in failures})
        reasons = "; ".join(sorted({reason for _, reason in failures}))
        where = f"port{'s' if len(ports) > 1 else ''} {', '.join(map(str, ports))}"
        hint = "a firewall drops it" if "no answer" in reasons else "see the reason"
        fix = f"{hint}: open all TCP ports between the nodes, as collectives use any of them"
        yield Finding(BAD, nodes, f"{what} ({where}: {reasons})", fix)


def check_port(case: Case) -> Iterator[Finding]:
    wanted, exact = case.needs.port, case.needs.that_port
    if not case.seen or case.nodes[0].facts is None:
        return
    master, found = case.nodes[0], case.nodes[0].facts.port
    if found not in (None, wanted):
        fix = f"on {master.name}: ss -ltnp 'sport = :{wanted}'"
        what = f"port {wanted} is taken on the master"
        if exact or not found:
            yield bad_finding(master, what, fix)
        else:
            yield warn_finding(master, f"{what}; {found} would be used", fix)


def check_names(case: Case) -> Iterator[Finding]:
    """Find two names of one machine, and a machine's own name that resolves elsewhere."""
    # The first node of each machine that was not reached by loopback.
    first: dict[tuple[str, int], Examined] = {}
    for node, facts in case.seen:
        known = first.get(facts.machine)
        if known is not None:
            what = f"{known.name} and {node.name} are the same machine ({facts.hostname})"
            fix = "remove one of them from the node list"
            yield Finding(BAD, (known.name, node.name), what, fix)
        elif facts.boot and not is_loopback(node.reached):
            first[facts.machine] = node
    for node, facts in case.seen:
        if node.checkup is None:
            continue
        if "names" in node.checkup.problems:
            fix = f"as root there: echo 127.0.1.1 {facts.hostname} >>/etc/hosts"
            yield warn_finding(node, f"its own name {facts.hostname!r} does not resolve", fix)
        own = {address.address for address in facts.addresses}
        resolved = [name for name in node.checkup.names or () if not is_loopback(name)]
        strange = [name for name in resolved if name not in own]
        if strange:
            fix = f"fix /etc/hosts on {node.name}: programs that ask for their own address get this"
            what = f"its own name resolves to {join_names(strange)}, which it does not have"
            yield warn_finding(node, what, fix)
