"""One node listens and says a word, others call it."""

import socket

from orchestrator.node.machine.reachability import dial_addresses, listen_on_ports
from orchestrator.protocol.requests.machine import Dial, Listen
from tests.node.running import wait_until

HERE = "127.0.0.1"


def called(*places: tuple[int, str]) -> tuple[str, ...]:
    return dial_addresses(
        Dial(places=tuple((HERE, port, word) for port, word in places), seconds=3.0)
    )


def test_listener_answers_right_word_alone() -> None:
    one, other = listen_on_ports(Listen(ports=(0, 0), word="gpu01"))
    assert called((one, "gpu01"), (other, "gpu01"), (one, "gpu02")) == (
        *("", ""),
        "something else answers there",
    )
    with socket.create_server((HERE, 0)) as taken:
        assert listen_on_ports(Listen(ports=(taken.getsockname()[1],), word="gpu01")) == (0,)


def test_listener_ends_after_its_seconds() -> None:
    (brief,) = listen_on_ports(Listen(ports=(0,), word="gpu01", seconds=0.3))
    (longer,) = listen_on_ports(Listen(ports=(0,), word="gpu01", seconds=60.0))
    wait_until(lambda: called((brief, "gpu01")) == ("connection refused",), "its end")
    assert called((longer, "gpu01")) == ("",)
