from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.node.job.ranks import fast_torchrun


def test_a_worker_begins_as_soon_as_the_master_listens() -> None:
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))  # bound, and refusing
        later = threading.Timer(0.3, master.listen)
        later.start()
        began = time.monotonic()
        fast_torchrun.wait_for("127.0.0.1", master.getsockname()[1])
        assert 0.25 < time.monotonic() - began < fast_torchrun.PATIENCE_SECONDS
        later.join()


def test_a_master_that_never_comes_is_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_torchrun, "PATIENCE_SECONDS", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        fast_torchrun.wait_for("127.0.0.1", nobody.getsockname()[1])


def test_who_waits_for_long_tries_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = [0.0], [0]

    def refused(*_: object, **__: object) -> None:
        tries[0] += 1
        raise ConnectionRefusedError

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(
        fast_torchrun, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    for patience, most in ((0.1, 21), (1.0, 70), (10.0, 130)):
        clock[0], tries[0] = 0.0, 0
        monkeypatch.setattr(fast_torchrun, "PATIENCE_SECONDS", patience)
        fast_torchrun.wait_for("10.0.0.1", 29500)
        assert 10 < tries[0] <= most


@pytest.mark.slow
def test_torchrun_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.agent.server import api

    def nobody_answers(name: str = "") -> str:
        raise AssertionError("a name server was asked")

    monkeypatch.setattr(api, "_get_fq_hostname", api._get_fq_hostname)  # undone afterwards
    monkeypatch.setattr(socket, "getfqdn", nobody_answers)
    fast_torchrun.ask_no_name_server()
    assert api._get_fq_hostname() == socket.gethostname()


class Agent:
    """What leaving asks of torchrun's agent: its store, and how many agents there are."""

    def __init__(self, store: Any, nodes: int) -> None:
        self._store = store
        self._worker_group = SimpleNamespace(group_world_size=nodes)


def leaving(monkeypatch: pytest.MonkeyPatch, *, is_master: bool) -> Callable[[Agent], None]:
    """What torchrun's agent goes through on this node when the job has ended well everywhere."""
    from torch.distributed.elastic.agent.server import api

    with monkeypatch.context() as patch:
        patch.setattr(api.SimpleElasticAgent, "_exit_barrier", lambda agent: None)
        fast_torchrun.leave_in_order(is_master)
        return cast(Any, api.SimpleElasticAgent._exit_barrier)


@pytest.mark.slow
def test_the_master_with_its_store_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    monkeypatch.setattr(fast_torchrun, "LAST_WORDS", timedelta(seconds=60))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    left = threading.Event()
    master_leaves = leaving(monkeypatch, is_master=True)
    others_leave = leaving(monkeypatch, is_master=False)

    def master() -> None:
        master_leaves(Agent(store, 3))
        left.set()

    thread = threading.Thread(target=master)
    thread.start()
    for _ in range(2):
        assert not left.wait(0.1)  # somebody is still there
        other = TCPStore("127.0.0.1", store.port, is_master=False)
        others_leave(Agent(other, 3))  # waits for nobody
    assert left.wait(20)
    thread.join()


@pytest.mark.slow
def test_the_master_waits_shortly_for_a_node_that_never_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed import TCPStore

    monkeypatch.setattr(fast_torchrun, "LAST_WORDS", timedelta(seconds=0.1))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leaving(monkeypatch, is_master=True)(Agent(store, 2))
    assert int(store.get("orchestrator/left")) == 1
