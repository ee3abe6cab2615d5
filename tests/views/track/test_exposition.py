"""What Prometheus reads is what the experiments say, in Prometheus's own format."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.protocol.message import encode
from orchestrator.records.experiment import JobRecord, NodeRecord
from orchestrator.views.track import exposition as tracking
from orchestrator.views.track.exposition import (
    HELP,
    OLD_SECONDS,
    STAYS_SECONDS,
    Exposition,
    Server,
    written,
)
from tests.views.track.jobs import NOW, job, tell

GRAFANA = Path(__file__).parents[3] / "config" / "grafana" / "orchestrator.json"


def points(root: Path, now: float = NOW) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in Exposition(root).points(now):
        found.setdefault(name, []).append((labels, value))
    return found


def test_what_ranks_and_nodes_say(tmp_path: Path) -> None:
    made = job(tmp_path, "one", goodput={"training": 30.0, "start": 10.0})
    tell(
        made,
        "rank_00_metrics.jsonl",
        {"time": NOW, "rank": 0, "step": 7, "loss": 0.5, "step_ms": 250.0, "data_ms": 50.0},
        {"time": NOW, "rank": 0, "step": 8, "loss": 0.25, "step_ms": 500, "acc": 0.9, "x": None},
    )
    tell(
        made,
        "node_00_metrics.jsonl",
        {"time": NOW, "node": 0, "about": {"host": "a"}},
        {"time": NOW, "node": 0, "cpu": 0.5, "net": {"eth0": [1.0, 2.0]}, "gpu": {"use": [0.9]}},
    )
    found = points(tmp_path)
    own = {"experiment": made.name}
    rank = {**own, "node": "a", "rank": "0"}
    assert found["job_state"] == [({**own, "state": "running"}, 1)]
    assert found["job_goodput_ratio"] == [(own, 0.75)]
    assert found["step"] == [(rank, 8)]
    assert found["step_seconds"] == [(rank, 0.5)]
    assert found["metric"] == [({**rank, "name": "acc"}, 0.9)]
    assert "step_part_seconds" not in found  # of the last line only
    node = {**own, "node": "a"}
    assert found["node_cpu_ratio"] == [(node, 0.5)]
    tell(made, "rank_00_metrics_2.jsonl", {"time": NOW, "rank": 0, "step": 3})
    assert points(tmp_path)["step"] == [(rank, 8), ({**rank, "trainer": "2"}, 3)]
    assert found["node_network_sent_bytes_per_second"] == [({**node, "interface": "eth0"}, 2.0)]
    assert found["node_gpu"] == [({**node, "gpu": "0", "name": "use"}, 0.9)]
    assert found.keys() <= HELP.keys()


@pytest.mark.parametrize("wrong", [0.0, -7200.0, 86400.0])
def test_a_node_is_told_of_while_its_file_grows_whatever_its_clock(
    tmp_path: Path, wrong: float
) -> None:
    made = job(tmp_path, "one")
    tell(made, "node_00_metrics.jsonl", {"time": NOW + wrong, "node": 0, "cpu": 0.5})
    os.utime(made.path / "outputs" / "node_00_metrics.jsonl", (NOW, NOW))
    assert points(tmp_path)["node_cpu_ratio"] == [({"experiment": made.name, "node": "a"}, 0.5)]
    assert "node_cpu_ratio" not in points(tmp_path, NOW + OLD_SECONDS + 1)


def test_what_is_not_known_is_not_told_as_nothing(tmp_path: Path) -> None:
    """Of a program that says nothing of its steps, nobody knows how much was training."""
    job(tmp_path, "foreign", goodput={"training": 0.0, "start": 10.0, "unknown": 90.0})
    assert "job_goodput_ratio" not in points(tmp_path)


def test_when_a_rank_has_told_something_is_by_our_clock(tmp_path: Path) -> None:
    node = vars(NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python", 0, 1, clock=-7200.0))
    made = job(tmp_path, "one", nodes=[node])
    tell(made, "rank_00_metrics.jsonl", {"time": NOW - 7200, "rank": 0, "step": 7})
    assert [value for _, value in points(tmp_path)["rank_told_timestamp_seconds"]] == [NOW]


def test_a_loss_that_is_no_number_is_told_as_that(tmp_path: Path) -> None:
    """Else an alarm would see the series end, as when a job is done."""
    made = job(tmp_path, "one")
    told = {"time": NOW, "rank": 0, "step": 7, "step_ms": 5.0, "mfu": None}
    tell(made, "rank_00_metrics.jsonl", {**told, "loss": 0.5}, {**told, "step": 8, "loss": None})
    assert [str(value) for _, value in points(tmp_path)["loss"]] == ["nan"]
    assert "mfu_ratio" not in points(tmp_path)
    text = written(Exposition(tmp_path).points(NOW))
    assert [line.rpartition(" ")[2] for line in text.splitlines() if "_loss{" in line] == ["NaN"]


def test_a_series_is_there_once() -> None:
    same = [("loss", {"x": "a" * 200 + end}, 0.5) for end in ("b", "c")]
    assert written(same).count("orchestrator_loss{") == 1


def test_a_job_that_is_over_is_told_of_for_a_while(tmp_path: Path) -> None:
    made = job(tmp_path, "one", state="failed", ended=NOW)
    assert points(tmp_path)["job_state"] == [({"experiment": made.name, "state": "failed"}, 1)]
    assert points(tmp_path, NOW + STAYS_SECONDS + 1) == {}
    (tmp_path / "broken_20260101_000000").mkdir()
    (tmp_path / "broken_20260101_000000" / "job.json").write_text("{")
    assert points(tmp_path, NOW).keys() == {
        "job_state",
        "job_attempt",
        "job_started_timestamp_seconds",
    }


def test_a_record_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    made = job(tmp_path, "one")
    looking = Exposition(tmp_path)
    assert 'state="running"' in written(looking.points(NOW))
    record = made.read_record()
    made.write_record(JobRecord.from_json({**encode(record), "nodes": [], "state": "stopped",
                                           "launch": {}, "ended": NOW}))  # fmt: skip
    assert 'state="stopped"' in written(looking.points(NOW))


def test_no_text_of_a_node_ends_a_label() -> None:
    bad = 'a"} 1\nevil{x="\\'
    text = written([("loss", {"experiment": bad}, 0.5), ("step", {"rank": "0"}, 1.0)])
    assert text.splitlines()[-1] == ('orchestrator_loss{experiment="a\\"} 1\\nevil{x=\\"\\\\"} 0.5')
    assert [line.split()[2] for line in text.splitlines() if "TYPE" in line] == [
        "orchestrator_step",
        "orchestrator_loss",
    ]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    job(tmp_path, "one")
    with Server(("127.0.0.1", 0), Exposition(tmp_path), "s3cret") as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def ask(server: Server, path: str, token: str = "s3cret", host: str = "") -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    headers = {"Authorization": f"Bearer {token}"} | ({"Host": host} if host else {})
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_server_answers_those_who_know_the_token(server: Server) -> None:
    assert ask(server, "/metrics?x")[0] == 200
    assert "orchestrator_job_state{" in ask(server, "/metrics")[1]
    assert ask(server, "/metrics", "s3cre") == (401, "")
    assert ask(server, "/metrics", "ü") == (401, "")
    assert ask(server, "/job.json")[0] == 404
    with pytest.raises(UsageError, match="cannot be listened on"):
        Server(("127.0.0.1", server.server_address[1]), server.exposition, "")


def test_who_is_slow_or_many_keeps_no_place(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "TOKEN_SECONDS", 0.5)
    place = ("127.0.0.1", server.server_address[1])
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(place, 60))
            for _ in range(tracking.CLIENTS)
        ]
        hung_up = [threading.Event() for _ in silent]
        for each, event in zip(silent, hung_up, strict=True):
            each.sendall(b"GET /metrics HTTP/1.1\r\n")
            threading.Thread(target=drip, args=(each, event), daemon=True).start()
        for event in hung_up:
            assert event.wait(60), "a byte now and then keeps nobody's place"
        assert ask(server, "/metrics")[0] == 200
        monkeypatch.setattr(tracking, "TOKEN_SECONDS", 600.0)
        waiting = [
            stack.enter_context(socket.create_connection(place, 60))
            for _ in range(tracking.CLIENTS + 1)
        ]
        assert waiting[0].recv(1) == b"", "the oldest makes room"
        assert ask(server, "/metrics")[0] == 200


def drip(connection: socket.socket, hung_up: threading.Event) -> None:
    """Send a byte of a request again and again, until nobody takes it."""
    connection.settimeout(0.01)
    while True:
        try:
            connection.sendall(b"a")
            if not connection.recv(1):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    hung_up.set()


def test_who_needs_no_token_must_mean_this_machine(server: Server) -> None:
    """Else a page in a browser of this machine reads it, by a name that its own DNS holds."""
    name = f"metrics.example.com:{server.server_address[1]}"
    assert ask(server, "/metrics", host=name)[0] == 200
    server.token = ""
    assert ask(server, "/metrics", "")[0] == 200
    assert ask(server, "/metrics", "", f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/metrics", "", name)[0] == 421


def test_the_dashboard_asks_for_what_there_is() -> None:
    text = GRAFANA.read_text()
    asked = set(re.findall(r"orchestrator_(\w+)", text.replace('"orchestrator_', '"orchestrator_')))
    assert asked - {"jobs"} <= HELP.keys()
    assert {"loss", "step_seconds", "node_gpu", "job_state"} <= asked
