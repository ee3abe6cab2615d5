"""The way to a node, resolved as far as ssh_config and the key files decide it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.head.connect.ssh_config import Algorithms, Destination, SshConfig

MOST_HOPS = 8
PATHS = ("keys", "certificates", "user_known_hosts", "global_known_hosts")


@dataclass(frozen=True)
class Route:
    """A node, and the jump hosts before it, the nearest to the node first."""

    hops: tuple[Destination, ...]
    identities: tuple[tuple[str, int, int, int], ...] = ()  # key files, as they are now

    @property
    def destination(self) -> Destination:
        return self.hops[0]

    @property
    def key(self) -> str:
        """Return what is equal only for two routes that differ in nothing.

        A dataclass shows all its fields, and ten times as fast as asdict() copies them.
        """
        return hashlib.sha256(repr(self).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class KnownHops(SshConfig):
    """An ssh_config of which nothing is asked but the jump hosts of one route."""

    hops: tuple[Destination, ...] = ()

    def last_hop(self, jump: str) -> Destination:
        return next(after for hop, after in pairwise(self.hops) if hop.jump == jump)


def route_to(config: SshConfig, destination: Destination) -> Route | None:
    """Resolve the way to a node; None for one whose connections cannot be held.

    A ProxyCommand with variables leads wherever the environment of each command says.
    """
    hops = [destination]
    while hops[-1].jump:
        if len(hops) > MOST_HOPS:
            return None
        hops.append(config.last_hop(hops[-1].jump))
    if any("$" in hop.proxy_command for hop in hops):
        return None
    return Route(tuple(hops), tuple(_identities(hops)))


def _identities(hops: list[Destination]) -> Iterator[tuple[str, int, int, int]]:
    for path in dict.fromkeys(
        path
        for hop in hops
        for key in hop.keys
        for path in (key, key.with_name(key.name + "-cert.pub"), *hop.certificates)
    ):
        try:
            status = path.stat()
        except OSError:
            continue
        yield str(path), status.st_mtime_ns, status.st_size, status.st_ino


def to_data(route: Route) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(asdict(route), default=str))
    return data


def from_data(data: dict[str, Any]) -> Route:
    """Return the route that another process of this version has described."""
    return Route(
        tuple(_destination(hop) for hop in data["hops"]),
        tuple((str(p), int(t), int(s), int(n)) for p, t, s, n in data["identities"]),
    )


def _destination(data: dict[str, Any]) -> Destination:
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in data.items()
    }
    values.update({name: tuple(map(Path, data[name])) for name in PATHS})
    if data["revoked_keys"] is not None:
        values["revoked_keys"] = Path(data["revoked_keys"])
    names = {name: tuple(data["algorithms"][name]) for name in data["algorithms"]}
    values["algorithms"] = Algorithms(**names)
    return Destination(**values)
