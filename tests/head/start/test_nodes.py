"""Which hosts a node looks for a route to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.head.start import nodes


@pytest.mark.parametrize(
    ("hosts", "asked"),
    [
        (["gpu1", "gpu2", "10.0.0.3"], ["gpu1", "10.0.0.3"]),  # a name server may not answer
        ([f"10.0.0.{n}" for n in range(60)], [f"10.0.0.{n}" for n in range(60)]),
        (
            [f"10.0.{n // 250}.{n % 250}" for n in range(512)],
            ["10.0.0.0", "10.0.0.249", "10.0.1.249", "10.0.2.11"],
        ),
        (
            ["a", *(f"fd00:0:0:{n % 2}::{n:x}" for n in range(1, 100))],
            ["a", "fd00:0:0:1::63", "fd00:0:0:0::62"],
        ),
    ],
)
def test_a_route_is_sought_to_each_of_a_few_hosts_or_to_one_of_each_network(
    hosts: list[str], asked: list[str]
) -> None:
    transport: Any = SimpleNamespace(host_of=lambda host: host)
    active: Any = hosts
    assert nodes.peers(transport, active) == asked
