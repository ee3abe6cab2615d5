"""Notices reach real commands, a real HTTP server and a real SMTP server, and hold nobody up."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.launch import Launch
from orchestrator.head.follow.notify import delivery, notice
from orchestrator.head.follow.notify.notice import Notice
from orchestrator.head.follow.notify.notifier import WAITING, Notifier, notifier_of
from orchestrator.head.follow.notify.target import Target, keep, parse
from orchestrator.protocol.reports import UNSAVED
from orchestrator.records.experiment import Attempt, Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import SlowRank, Verdict
from tests.head.follow.notify.receiver import Receiver, receiving

CAUSE = Verdict(
    **{"node": 1, "node_name": "b", "rank": 3, "time": 1.0, "kind": "exception"},
    **{"message": "ValueError: <!channel> @everyone \x1b[2J\u202e", "traceback": "t" * 20_000},
    **{"where": "train.py:7 in step", "title": "an exception", "fix": "look there"},
    others=2,
)


def record(state: str = "failed", **more: Any) -> JobRecord:
    node = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python3", 0, 2)
    fields = {
        **{"job": "j", "experiment": "/e/run_1", "state": state, "command": [], "nodes": [node]},
        **{"started": 100.0, "ended": 160.0, "verdict": CAUSE},
        **{"launch": Launch(notify=("cmd:x",), max_restarts=3)},
    }
    return JobRecord(**{**fields, **more})  # type: ignore[arg-type]


Server = tuple[str, type[Receiver]]


@pytest.fixture
def server() -> Iterator[Server]:
    with receiving() as both:
        yield both


def told(to: str) -> Target:
    return parse(to)


def test_a_webhook_gets_what_chat_programs_show(server: Server) -> None:
    url, receiver = server
    said: list[str] = []
    notifier = Notifier([told(f"webhook:{url}/hook?secret")], said.append)
    notifier.over(record())
    notifier.close()
    ((path, body),) = receiver.got
    assert path == "/hook?secret" and not said
    assert (body["event"], body["state"], body["experiment"]) == ("failure", "failed", "run_1")
    lines = body["text"].splitlines()
    assert lines[0] == "run_1 failed after 1 min 00 s on 1 node"
    assert "rank 3 on node 1 (b)" in lines[1] and lines[-1] == "what to do: look there"
    assert body["content"] == body["text"] and body["allowed_mentions"] == {"parse": []}
    assert not set("<>\x1b\u202e") & set(body["text"]) and "@everyone" not in body["text"]
    assert body["verdict"]["rank"] == 3 and len(body["verdict"]["traceback"]) == 8000


@pytest.mark.parametrize(
    ("path", "problem"), [("moved", "answered 302, that it is elsewhere"), ("gone", "answered 404")]
)
def test_a_webhook_that_refuses_is_said_once_without_its_url(
    server: Server, path: str, problem: str
) -> None:
    url, receiver = server
    said: list[str] = []
    notifier = Notifier([told(f"webhook:{url}/{path}")], said.append)
    for _ in range(3):
        notifier.over(record())
    notifier.close()
    assert [each for each, _ in receiver.got] == [f"/{path}"] * 3  # a redirect is not followed
    assert len(said) == 1 and problem in said[0] and f"/{path}" not in said[0]


def test_nobody_there_and_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer() -> None:
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            connection.close()

        threading.Thread(target=answer).start()
        some = notice.of_end(record())
        url = f"http://127.0.0.1:{port}/x"
        assert "HTTP" in delivery.deliver(told(f"webhook:{url}"), some, 10)
    assert "refused" in delivery.deliver(told(f"webhook:{url}"), some, 10)


def test_a_slow_server_holds_nobody_up(server: Server) -> None:
    url, receiver = server
    said: list[str] = []
    notifier = Notifier([told(f"webhook:{url}/slow"), told(f"webhook:{url}/ok")], said.append)
    for _ in range(WAITING + 10):
        notifier.over(record())
    notifier.close(0.2)
    assert [line for line in said if "too slow" in line and "127.0.0.1" in line]
    assert len(said) <= 2  # the other has as many waiting, and may be too slow for this test, too
    slow = [path for path, _ in receiver.got if path == "/slow"]
    assert len(slow) <= 1


def test_a_command_gets_the_event(tmp_path: Path) -> None:
    said: list[str] = []
    command = f'cat > "{tmp_path}/$NOTIFY_EVENT"; env > {tmp_path}/env; echo "$NOTIFY_TEXT"'
    notifier = Notifier([told(f"cmd:{command}")], said.append)
    attempt = Attempt(1, "j", 100.0, 130.0, "failed", 1, CAUSE, ["a", "b"], step=7, restarted=True)
    notifier.over(record("restarting", attempts=[attempt], ended=None, verdict=None))
    notifier.over(record("done", verdict=None))
    found = SlowRank(cause="slow compute", rank=3, node=1, step=9, text="rank 3 is slow")
    notifier.straggler(record("running", ended=None), found)
    notifier.straggler(record("running", ended=None), found.replace(step=19))
    notifier.close()
    unsaved = notice.of_straggler(record(), found.replace(cause=UNSAVED, text="NOT SAVED: x"), 9.0)
    assert unsaved.text == "run_1 NOT SAVED: x"  # nobody is held up by that
    assert not said
    restart, end, slow = (
        json.loads((tmp_path / name).read_text()) for name in ("restart", "end", "straggler")
    )
    first = "run_1 is started again: attempt 1 of at most 4 failed after 30 s at step 7"
    assert restart["text"].startswith(first) and "train.py:7" in restart["text"]
    assert end["text"] == "run_1 is done after 1 min 00 s on 1 node: /e/run_1"
    assert end["verdict"] is None and slow["straggler"]["step"] == 9  # told once
    environment = (tmp_path / "env").read_text()
    assert "NOTIFY_EXPERIMENT=run_1\n" in environment and "NOTIFY_PATH=/e/run_1\n" in environment


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo first >&2; echo no room >&2; exit 3", "exit code 3: no room"),
        ("exec < /dev/null; yes | head -c 100000000 >&2; exit 4", "exit code 4: y"),
        ("no-such-program-at-all", "exit code 127"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_a_command_that_fails(command: str, problem: str) -> None:
    assert problem in delivery.deliver(told(f"cmd:{command}"), notice.of_end(record()), 20)


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"
    problem = delivery.deliver(told(f"cmd:{command}"), notice.of_end(record()), 1)
    assert problem == "it was not done within 1 s"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and lives(child):
        time.sleep(0.01)
    assert not lives(child)


def lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_mail_goes_through_sendmail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/mail\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert delivery.deliver(told("mail:ops@example.org"), notice.of_end(record()), 20) == ""
    assert (tmp_path / "words").read_text() == "-i -- ops@example.org\n"
    headers, _, body = (tmp_path / "mail").read_text().partition("\n\n")
    assert "Subject: [orchestrator] run_1 failed after 1 min 00 s" in headers
    assert "To: ops@example.org" in headers and body


class Smtp(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        letter = False
        for line in self.rfile:
            self.server.lines.append(line.decode())  # type: ignore[attr-defined]
            if letter:
                letter = line != b".\r\n"
                self.wfile.write(b"" if letter else b"250 taken\r\n")
            elif line.upper().startswith(b"DATA"):
                letter = True
                self.wfile.write(b"354 go on\r\n")
            elif line.upper().startswith(b"QUIT"):
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 well\r\n")


def test_mail_goes_to_this_machines_server_where_there_is_no_sendmail() -> None:
    message = delivery.mail("ops@example.org", notice.of_end(record("done", verdict=None)))
    with socketserver.TCPServer(("127.0.0.1", 0), Smtp) as listening:
        listening.lines = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=listening.handle_request)
        thread.start()
        port = listening.server_address[1]
        assert delivery.by_smtp(message, 10, "127.0.0.1", port) == ""
        thread.join()
        text = "".join(listening.lines)  # type: ignore[attr-defined]
    assert "rcpt to:<ops@example.org>" in text.lower() and "run_1 is done" in text
    assert "neither sendmail" in delivery.by_smtp(message, 10, "127.0.0.1", port)


def test_who_tells(tmp_path: Path) -> None:
    """The head of the first node's part; nobody, where another may have written whom."""
    said: list[str] = []
    experiment, some = Experiment(tmp_path), record()
    keep(experiment, [told("cmd:x")])
    assert len(notifier_of(experiment, some, said.append).couriers) == 1
    second = record(nodes=[NodeRecord(1, "b", "b", None, None, "b", "python3", 2, 2)])
    assert not notifier_of(experiment, second, said.append).couriers
    assert not notifier_of(experiment, record(launch=Launch()), said.append).couriers
    (tmp_path / ".notify").chmod(0o606)
    assert not said and not notifier_of(experiment, some, said.append).couriers
    assert "nobody is notified" in said[0]


def test_a_long_text_is_cut() -> None:
    long = Notice("end", "e", "/e", "j", "done", 1, 0.0, "h", notice.shown(["x" * 9000]))
    assert len(long.text) < 2000 and len(long.title) < 2000
