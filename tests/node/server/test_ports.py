from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.node.server import ports as module
from orchestrator.node.server.ports import Port


@pytest.fixture
def ports() -> Iterator[Any]:
    made: list[Port] = []

    def hold(wanted: int, *, exact: bool = False) -> int:
        made.append(Port(wanted, exact))
        return made[-1].number

    yield hold
    for port in made:
        port.close()


BASE = 42000 + os.getpid() % 5000  # where nobody else listens, most likely


def test_ports_are_held_until_their_holder_is_gone(ports: Any) -> None:
    first = ports(BASE)
    assert BASE <= first < BASE + 50
    assert ports(first, exact=True) == 0
    assert ports(first) > first
    # A supervisor inherits it: the port stays held when the link that took it is gone.
    port = Port(first + 60, False)
    assert port.holder is not None
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[port.holder.fileno()])
    port.close()
    assert ports(port.number, exact=True) == 0
    child.kill()
    child.wait()
    assert ports(port.number, exact=True) == port.number


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "127.0.0.9", "::", "::1"])
def test_a_port_somebody_listens_on_is_passed_over(ports: Any, address: str) -> None:
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


def test_a_port_that_was_just_used_is_free(ports: Any) -> None:
    """The last connections of the job before are in TIME_WAIT: torchrun could listen there."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        server.bind(("127.0.0.1", 0))
        server.listen()
        number = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)), server.accept()[0] as accepted:
            accepted.shutdown(socket.SHUT_WR)
    assert ports(number, exact=True) == number


def test_there_are_no_ports_beyond_the_last(ports: Any) -> None:
    assert ports(65536) == 0
    assert ports(65535) in (0, 65535)


def test_names_that_somebody_takes_away_take_no_port_away(
    ports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine can take the names of all the ports that would be tried."""
    monkeypatch.setattr(module, "PORTS_TO_TRY", 5)
    start = BASE + 200
    with contextlib.ExitStack() as stack:
        for number in range(start, start + 5):
            name = stack.enter_context(socket.socket(socket.AF_UNIX))
            name.bind(f"\0orchestrator-port-{number}")
        assert start <= ports(start) < start + 5
        assert ports(start, exact=True) == 0  # another launch wants the same
