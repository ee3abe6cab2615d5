import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.node.server.ports import hold_port as held


@pytest.fixture
def ports() -> Iterator[Any]:
    made: list[socket.socket] = []

    def hold(wanted: int, *, exact: bool = False) -> int:
        number, holder = held(wanted, exact=exact)
        made.extend([holder] if holder else [])
        return number

    yield hold
    for holder in made:
        holder.close()


# Other processes are unlikely to listen on these ports.
BASE = 42000 + os.getpid() % 5000


def test_port_is_held_until_holder_ends(ports: Any) -> None:
    first = ports(BASE)
    assert BASE <= first < BASE + 50
    assert ports(first, exact=True) == 0
    assert ports(first) > first
    # A supervisor inherits it: the port stays held when the link that took it is gone.
    number, holder = held(first + 60, exact=False)
    assert holder is not None
    with holder:
        child = subprocess.Popen(["sleep", "1000"], pass_fds=[holder.fileno()])
    assert ports(number, exact=True) == 0
    child.kill()
    child.wait()
    assert ports(number, exact=True) == number


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "127.0.0.9", "::", "::1"])
def test_port_in_use_is_skipped(ports: Any, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} cannot be used here")
        taken.listen()
        number = taken.getsockname()[1]
        assert ports(number, exact=True) == 0
        assert ports(number) != number


def test_port_search_ends_at_last_port(ports: Any) -> None:
    assert ports(65536) == 0
    assert ports(65535) in (0, 65535)
