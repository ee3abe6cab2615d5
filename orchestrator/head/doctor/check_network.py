"""Checks of the network: interfaces, who really reaches whom, names that mislead. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from orchestrator.common import text
from orchestrator.common.hosts import listed
from orchestrator.head.doctor.findings import BAD, WARN, Case, Examined, Finding, unequal
from orchestrator.head.nodes.facts import is_loopback
from orchestrator.head.plan import nccl_transport
from orchestrator.protocol.requests.machine import LARGE_LOST

SLOW = 1000  # Mb/s: from there on computing rarely hides what is sent
GRADIENTS = 3200  # Mbit of 100 million gradients in fp32
SLOW_FIX = (
    "use a faster interface (ifname=, or its addresses in the list), or send less often"
    " (training.gradient_accumulation); `orchestrator verify` measures it"
)


def net(case: Case) -> Iterator[Finding]:
    """Check the interface of each node towards the master, and compare them."""
    if case.network_error:
        what, fix = case.network_error
        names = tuple(node.name for node, _ in case.seen)
        named = tuple(name for name in names if is_named(name, what))
        yield Finding("net", BAD, named or names, what, fix)
        return
    speeds = []
    for node, facts in case.seen:
        address = case.addresses.get(node.name)
        interface = facts.interface(address.interface) if address else None
        if interface is None:
            continue
        if interface.state not in ("up", "unknown"):
            what = f"{node.name}: {interface.name} is {interface.state}"
            fix = f"on {node.name}: ip link set {interface.name} up"
            yield Finding("net", BAD, (node.name,), what, fix)
        if interface.speed and interface.kind != "loopback":
            speeds.append((node.name, f"{interface.speed} Mb/s"))
    yield from unequal(
        "net", WARN, "speed of the interface", speeds, "ethtool INTERFACE; the cable"
    )
    yield from ports_down(case)
    yield from slow_link(case)


def slow_link(case: Case) -> Iterator[Finding]:
    """Warn where the nodes meet over a slow link, and no faster card is used."""
    if len(case.seen) < 2 or uses_cards(case):
        return
    speeds = {}
    for node, facts in case.seen:
        address = case.addresses.get(node.name)
        interface = facts.interface(address.interface) if address else None
        if interface and interface.speed and interface.kind != "loopback":
            speeds[node.name] = interface.speed
    if not speeds or max(speeds.values()) > SLOW:  # of unequal ones there is a finding already
        return
    speed = min(speeds.values())
    what = f"the nodes meet over {speed / 1000:g} Gb/s (on {listed(list(speeds))}):"
    what = f"{what} 100 million gradients take {text.duration(GRADIENTS / speed)} a step"
    yield Finding("net", WARN, tuple(speeds), what, SLOW_FIX)


def uses_cards(case: Case) -> bool:
    """Tell whether NCCL sends over cards that are faster than the link: gloo, on CPUs, never does.

    Cards that the user has chosen are taken for faster ones where each node has any.
    """
    if not all(facts.gpus for _, facts in case.seen):
        return False
    if case.needs.fabric == "yours":
        return all(any(p.active and not p.software for p in f.rdma) for _, f in case.seen)
    return case.needs.fabric in nccl_transport.LAYERS


def is_named(name: str, sentence: str) -> bool:
    """Tell whether a sentence names a node: 10.0.0.1 is not in a sentence about 10.0.0.12."""
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\d)", sentence) is not None


def ports_down(case: Case) -> Iterator[Finding]:
    active = [
        (node.name, sum(port.active and not port.software for port in facts.rdma))
        for node, facts in case.seen
        if facts.rdma
    ]
    fix = "on these nodes: ibstat, or rdma link"
    yield from unequal("net", WARN, "RDMA ports that are up", active, fix)


def mtu(case: Case) -> Iterator[Finding]:
    sizes = []
    for node, facts in case.seen:
        address = case.addresses.get(node.name)
        interface = facts.interface(address.interface) if address else None
        if interface and interface.kind != "loopback":
            sizes.append((node.name, interface.mtu))
    fix = "on these nodes, as root: ip link set INTERFACE mtu {most}"
    yield from unequal("mtu", WARN, "MTU", sizes, fix)
    yield from too_large(case, dict(sizes))


def too_large(case: Case, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Name the nodes between which large packets are lost: ranks meet there, and then hang."""
    pairs = sorted({(s, t) for (s, t, _), reason in case.silent.items() if reason == LARGE_LOST})
    if not pairs:
        return
    nodes = sorted({name for pair in pairs for name in pair})
    named = {tuple(sorted(pair)) for pair in pairs}
    shown = listed([f"{one} and {other}" for one, other in sorted(named)])
    mtus = ", ".join(f"{sizes[name]} on {name}" for name in nodes[:4] if name in sizes)
    what = f"between {shown} {LARGE_LOST} (MTU {mtus})"
    fix = (
        "the network between them takes smaller packets than they send: let the switch take jumbo"
        " frames, or type on them, as root: ip link set INTERFACE mtu 1500 (1280 below a VPN)"
    )
    yield Finding("mtu", BAD, tuple(nodes), what, fix)


def links(case: Case) -> Iterator[Finding]:
    """Name nodes that others cannot reach; a blocked node is one finding, not one per pair."""
    if not case.full:
        return
    blocked: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for (source, target, port), reason in case.silent.items():
        if reason == LARGE_LOST:  # see too_large()
            continue
        blocked.setdefault((source, target), []).append((reason, port))
    towards, away = Counter(t for _, t in blocked), Counter(s for s, _ in blocked)
    others = len(case.seen) - 1
    for target in [name for name, count in towards.items() if others > 1 and count == others]:
        pairs = [pair for pair in blocked if pair[1] == target]
        yield unreached(f"nobody reaches {target}", blocked, pairs, (target,))
    for source in [name for name, count in away.items() if others > 1 and count == others]:
        pairs = [pair for pair in blocked if pair[0] == source]
        if pairs:
            yield unreached(f"{source} reaches nobody", blocked, pairs, (source,))
    for source, target in list(blocked):
        what = f"{source} does not reach {target}"
        yield unreached(what, blocked, [(source, target)], (source, target))


def unreached(
    what: str,
    blocked: dict[tuple[str, str], list[tuple[str, int]]],
    pairs: list[tuple[str, str]],
    nodes: tuple[str, ...],
) -> Finding:
    """Make one finding of these pairs, and take them out of `blocked`."""
    failures = [failure for pair in pairs for failure in blocked.pop(pair, [])]
    whys = sorted({reason for reason, _ in failures})
    ports = sorted({port for _, port in failures})
    where = f"port {ports[0]}" if len(ports) == 1 else f"ports {', '.join(map(str, ports))}"
    hint = (
        "a firewall drops it" if any("no answer" in reason for reason in whys) else "see the reason"
    )
    fix = f"{hint}: open all TCP ports between the nodes, as collectives use any of them"
    return Finding("links", BAD, nodes, f"{what} ({where}: {'; '.join(whys)})", fix)


def port(case: Case) -> Iterator[Finding]:
    wanted, exact = case.needs.port, case.needs.that_port
    if not case.seen or case.nodes[0].facts is None:
        return
    master, facts = case.nodes[0], case.nodes[0].facts
    if facts.port is None or facts.port == wanted:
        return
    fix = f"on {master.name}: ss -ltnp 'sport = :{wanted}'"
    if exact or not facts.port:
        what = f"port {wanted} is taken on the master, {master.name}"
        yield Finding("port", BAD, (master.name,), what, fix)
    else:
        what = f"port {wanted} is taken on the master, {master.name}: {facts.port} would be used"
        yield Finding("port", WARN, (master.name,), what, fix)


def names(case: Case) -> Iterator[Finding]:
    """Find two names of one machine, and a machine's own name that resolves elsewhere."""
    first: dict[tuple[str, int], Examined] = {}  # of each machine, not reached by loopback
    for node, facts in case.seen:
        known = first.get(facts.machine)
        if known is not None:
            what = f"{known.name} and {node.name} are the same machine ({facts.hostname})"
            fix = "remove one of them from the node list"
            yield Finding("names", BAD, (known.name, node.name), what, fix)
        elif facts.boot and not is_loopback(node.reached):
            first[facts.machine] = node
    for node, checkup in case.checked_in_depth:
        addresses = {address.address for address in node.facts.addresses} if node.facts else set()
        if "names" in checkup.problems:
            hostname = node.facts.hostname if node.facts else ""
            what = f"{node.name}: its own name {hostname!r} does not resolve"
            fix = f"as root there: echo 127.0.1.1 {hostname} >>/etc/hosts"
            yield Finding("names", WARN, (node.name,), what, fix)
        strange = [
            name for name in checkup.names or () if name not in addresses and not is_loopback(name)
        ]
        if strange:
            what = (
                f"{node.name}: its own name resolves to {listed(strange)}, which it does not have"
            )
            fix = f"fix /etc/hosts on {node.name}: programs that ask for their own address get this"
            yield Finding("names", WARN, (node.name,), what, fix)
