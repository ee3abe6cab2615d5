"""The server's answers: to strangers, about every kind of experiment, while files grow."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Experiment
from orchestrator.views import tail as log_tail
from orchestrator.views.dashboard import app, logs
from orchestrator.views.dashboard.app import MOST_STREAMS, MOST_TOPICS, listen
from orchestrator.views.dashboard.command import Stopping
from orchestrator.views.dashboard.hub import Topic, following
from orchestrator.views.places import Places
from tests.views.dashboard.client import PATIENCE, Got, Site
from tests.views.report.stories import experiment, line
from tests.views.report.test_page import EVIL, Parts

RUN = "run_20260101_000000"
CAUSE = {
    **{"node": 1, "node_name": "beta", "rank": 3, "time": 1.7e9, "kind": "exception"},
    **{"message": "ValueError: 3", "traceback": "", "where": "", "title": "an exception"},
    **{"fix": "", "same": [], "also": [], "others": 0},
}
RUNNING: dict[str, Any] = {"state": "running", "ended": None, "exit_code": None}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    root = tmp_path / "experiments"
    root.mkdir(mode=0o700)
    return Site(root)


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), PATIENCE)


# -- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/", f"/experiment/{RUN}", "/static/page.js", "/api/experiments", "/cluster", "/api/cluster"],
)
def test_without_the_token_nothing_is_shown(site: Site, path: str) -> None:
    for headers in ({}, {"cookie": f"{site.guard.cookie}=x"}, {"authorization": "Bearer x"}):
        got = asyncio.run(site.ask(path, headers=headers))
        assert got.code == 401 and str(site.root) not in got.text
    got = asyncio.run(site.ask(f"{path}?token=x", headers={}))
    assert got.code == 401 and "set-cookie" not in got.headers
    got = asyncio.run(site.ask(path, headers={**site.own, "host": "evil.example.com"}))
    assert got.code == 421


NUMBERS = ("-1", "1e5", "9" * 5000, "0" * 5000, "99999999999999999999", "\u0663", "\u00b2", "1\x00")
NAMES = (
    *("..", "../../etc/passwd", "..%2f..", f"{RUN}/../x", "\\..\\", "//evil.example", "*", "~"),
    *("\x00", f"{RUN}\x00", "a" * 5000, "\ufffd", "\n", "<script>", "((((((", "\u0130"),
)
ROUTES = (
    *("/{}", "/experiment/{}", "/static/{}", "/compare?e={}", "/api/page?e={}", "/api/events?e={}"),
    *("/api/experiments/{}/events?node=0", "/api/experiments/{}/search?q=a", "/?token={}"),
    *("/api/experiments/{}/stop", f"/api/experiments/{RUN}/search?q={{}}"),
    f"/api/experiments/{RUN}/events?node={{}}",
)


@pytest.mark.parametrize("route", ROUTES)
def test_no_number_and_no_name_in_an_address_is_a_defect(site: Site, route: str) -> None:
    experiment(site.root / RUN)

    async def ask_all() -> None:
        for name in (*NUMBERS, *NAMES, ""):
            for method in ("GET", "POST"):
                got = await site.ask(route.format(name), method, until=lambda got: got.code)
                assert got.code < 500 and "Traceback" not in got.text, (method, name)

    asyncio.run(ask_all())


def test_a_number_that_no_node_has_is_not_found(site: Site) -> None:
    experiment(site.root / RUN)
    for number in ("7", *NUMBERS):
        assert site.get(f"/api/experiments/{RUN}/events?node={number}").code == 404, number


# -- whoever else can connect ------------------------------------------------------------------

MOST = 20  # strangers, and as many clients
HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
SLOW_BODY = b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"
UPGRADE = HALF + (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
WITHOUT_TOKEN = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclasses.dataclass
class Served:
    """A site on a port, and sockets to it."""

    site: Site
    port: int
    sockets: contextlib.ExitStack

    def stranger(self, sends: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        self.sockets.enter_context(connection)
        connection.sendall(sends)
        return connection

    def owner(self, path: str) -> socket.socket:
        token = f"Authorization: Bearer {self.site.guard.token}"
        return self.stranger(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{token}\r\n\r\n".encode())


@pytest.fixture
def served(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(app.Connection, "strangers", Places(MOST))
    monkeypatch.setattr(app, "MOST_STRANGERS", MOST)
    monkeypatch.setattr(app, "MOST_CLIENTS", MOST)
    listening = listen("127.0.0.1", 0)
    server = app.server(site.app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    with contextlib.ExitStack() as sockets:
        yield Served(site, listening.getsockname()[1], sockets)
    server.should_exit = True
    thread.join()


def hung_up(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_who_shows_no_token_is_hung_up_on_and_who_did_stays(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "TOKEN_SECONDS", 0.2)
    looks_on = served.owner("/api/events")
    assert b"200 OK" in looks_on.recv(1 << 16)
    for sends in (b"", HALF, SLOW_BODY, UPGRADE, WITHOUT_TOKEN):
        assert hung_up(served.stranger(sends)), sends
    experiment(served.site.root / RUN)
    got = b""
    while RUN.encode() not in got:
        got += looks_on.recv(1 << 16)


def test_strangers_are_counted_apart_from_the_owner(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "TOKEN_SECONDS", 600.0)
    first, *_ = [served.stranger(HALF) for _ in range(MOST + 1)]
    assert hung_up(first), "the oldest makes room"
    for _ in range(2 * MOST):
        served.stranger(HALF)
    assert b"200 OK" in served.owner("/api/experiments").recv(1 << 16)


def test_the_token_becomes_a_cookie(site: Site) -> None:
    got = asyncio.run(site.ask(f"/?token={site.guard.token}", headers={}))
    cookie = got.headers["set-cookie"]
    assert got.code == 200 and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert site.guard.token not in cookie + got.text and 'content="0;url=/"' in got.text
    name, _, value = cookie.partition(";")[0].partition("=")
    assert asyncio.run(site.ask("/", headers={"cookie": f"{name}={value}"})).code == 200
    got = asyncio.run(site.ask(f"//evil.example/x?token={site.guard.token}", headers={}))
    assert "url=/evil.example/x" in got.text  # of this server


def test_every_answer_has_the_policy(site: Site) -> None:
    for got in (site.get("/"), site.get("/nothing"), asyncio.run(site.ask("/", headers={}))):
        assert "script-src 'self'" in got.headers["content-security-policy"]
        assert "unsafe" not in got.headers["content-security-policy"]
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["cache-control"] == "no-store"


# -- stop -------------------------------------------------------------------------------------


def test_a_stop_runs_no_file_of_the_directory_and_takes_no_name_for_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the directory was run')")
    (tmp_path / "experiments").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    name = f"--ssh-config={RUN}"
    answer = asyncio.run(Stopping(Where(experiments=Path("experiments"))).stop(name))
    assert f"there is no experiment '{name}'" in answer


def test_a_stop_is_asked_for_by_a_page_of_ours_alone(site: Site) -> None:
    experiment(site.root / RUN, steps=0, **RUNNING)
    experiment(site.root / "over_20260101_000000", steps=0)
    path, form = f"/api/experiments/{RUN}/stop", {"x-orchestrator-form": site.guard.form}

    async def talk() -> None:
        for headers in (site.own, {**site.own, **form, "origin": "http://evil.example"}, form):
            refused = await site.ask(path, "POST", headers)
            assert refused.code in (401, 403) and not site.stopped
        assert (await site.ask(path)).code == 405  # a link, a picture
        over = path.replace(RUN, "over_20260101_000000")
        assert (await site.ask(over, "POST", {**site.own, **form})).code == 409
        taken = await site.ask(path, "POST", {**site.own, **form})
        assert taken.code == 202
        await until(lambda: site.stopped == [RUN] and not site.board.tasks)
        events = f"/api/experiments/{RUN}/events"
        said = await site.ask(events, until=lambda got: got.events("stopping"))
        assert said.events("stopping") == ["node 0: nothing left"]

    asyncio.run(talk())


# -- what is there ----------------------------------------------------------------------------


def test_every_kind_of_experiment(site: Site) -> None:
    assert Site(site.root).get("/api/experiments").json == {"experiments": []}
    experiment(site.root / "a_20260101_000000")
    experiment(site.root / "b_20260102_000000", state="failed", exit_code=1, verdict=CAUSE)
    experiment(site.root / "c_20260103_000000", steps=0, **RUNNING)
    experiment(site.root / "d_20260104_000000", steps=40, **RUNNING)
    damaged = experiment(site.root / "e_20260105_000000")
    (damaged.path / "job.json").write_text("{")
    rows = {row["name"][0]: row for row in site.get("/api/experiments").json["experiments"]}
    assert list(rows) == ["e", "d", "c", "b", "a"]
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        **{"a": "done", "b": "failed", "c": "running", "d": "running", "e": "damaged"},
    }
    assert rows["b"]["cause"] == "an exception: ValueError: 3" and "no JSON" in rows["e"]["cause"]
    assert (rows["d"]["step"], rows["d"]["slowest"]) == (40, "rank 2 +29%")
    assert (rows["a"]["nodes"], rows["a"]["ranks"], rows["c"]["step"]) == (2, 4, None)
    for name in ("a_20260101", "b_20260102", "c_20260103", "d_20260104"):
        got = site.get(f"/api/page?e={name}_000000")
        assert got.code == 200 and name in got.json["heading"], got.text
    assert len(site.get("/api/page?e=a_20260101_000000").json["data"]["charts"]) > 5
    assert "nothing to draw" in site.get("/api/page?e=c_20260103_000000").json["drawn"]
    assert site.get("/experiment/e_20260105_000000").code == 200
    got = site.get("/api/page?e=e_20260105_000000")
    assert got.code == 409 and "not the record of a job" in got.json["error"]
    both = site.get("/api/page?e=a_20260101_000000&e=d_20260104_000000").json
    assert [line["name"] for line in both["data"]["charts"][0]["lines"]] == [
        "a_20260101_000000",
        "d_20260104_000000",
    ]
    assert "What differs" in both["details"]


@pytest.mark.parametrize("verdict", [{"title": 5}, {"time": "x"}])
def test_one_that_makes_no_sense_hides_no_other(site: Site, verdict: dict[str, Any]) -> None:
    experiment(site.root / "a_20260101_000000")
    experiment(site.root / "b_20260102_000000", state="failed", verdict=verdict)
    told = experiment(site.root / "c_20260103_000000", **RUNNING)
    line = {"attempt": 1, "began": 1.7e9, "trains": 1.7e9, "first": 0, "time": float("nan"),
            "step": 5, "data": 0, "checkpoints": 0}  # fmt: skip
    (told.path / "outputs" / "time_spent.jsonl").write_text(json.dumps(line) + "\n")
    got = site.get("/api/experiments")
    rows = {row["name"][0]: row for row in got.json["experiments"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        **{"a": "done", "b": "damaged", "c": "running"},
    }
    assert "must be of type" in rows["b"]["cause"] and "NaN" not in got.text


@pytest.mark.parametrize("name", ["..", "../secret_20260101_000000", "/etc", ".", "", "x" * 3000])
def test_no_path_leads_out(site: Site, name: str) -> None:
    experiment(site.root.parent / "secret_20260101_000000")
    experiment(site.root / RUN)
    for path in (f"/experiment/{name}", f"/api/experiments/{name}/events", f"/static/{name}"):
        assert site.get(path).code in (400, 404)
    assert site.get(f"/api/page?e={name}").code in (400, 404)
    (site.root / "link_20260101_000000").symlink_to(site.root.parent / "secret_20260101_000000")
    assert site.get("/api/page?e=link_20260101_000000").code == 404


def test_a_log_that_is_a_link_is_not_read(site: Site) -> None:
    made = experiment(site.root / RUN, **RUNNING)
    log = made.log(made.read_record().nodes[0])
    secret = site.root.parent / "secret"
    secret.write_text("hidden\n")
    log.unlink()
    log.symlink_to(secret)
    tail = log_tail.Tail(log_tail.log_of(made, 0))  # type: ignore[arg-type]
    assert not tail.advance() and not tail.lines
    assert logs.search(made, "hidden")["count"] == 0


def test_nothing_that_a_node_says_becomes_html(site: Site) -> None:
    made = experiment(site.root / RUN, steps=20, state="failed", verdict={**CAUSE, "title": EVIL})
    record = made.read_record()
    nodes = [dataclasses.replace(node, name=EVIL, state=EVIL) for node in record.nodes]
    evil = dataclasses.replace(
        record, nodes=nodes, command=["x", EVIL], verdict={**CAUSE, "message": EVIL, "fix": EVIL}
    )
    made.write_record(evil)
    made.write("config.yaml", EVIL)
    made.log(nodes[0]).write_text(EVIL + "\n")
    metrics = made.path / "outputs" / "rank_00_metrics.jsonl"
    metrics.write_text("".join(json.dumps({**line(0, s, 2), EVIL: 1.0}) + "\n" for s in (1, 2, 3)))
    shell = Parts(site.get(f"/experiment/{RUN}").text)
    assert shell.tags.count("script") == 4 and "img" not in shell.tags  # three files and no data
    assert EVIL in shell.words
    parts = site.get(f"/api/page?e={RUN}").json
    for name in ("heading", "drawn", "details"):
        shown = Parts(parts[name])
        assert not {"script", "img"} & set(shown.tags), name
        assert not [key for key, _ in shown.attributes if key.startswith("on")]
    assert EVIL in Parts(parts["details"]).words and EVIL in Parts(parts["drawn"]).words
    (row,) = site.get("/api/experiments").json["experiments"]
    assert EVIL in row["cause"]  # as data, which the script shows as text
    script = (Path(logs.__file__).parent / "web" / "board.js").read_text()
    assert script.count("innerHTML") == 1 and "insertAdjacentHTML" not in script


# -- while it grows ---------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_appended_is_seen(site: Site) -> None:
    made = experiment(site.root / RUN, steps=5, **RUNNING)
    log = made.log(made.read_record().nodes[1])
    path = f"/api/experiments/{RUN}/events?node=1"

    def lines(got: Got) -> list[str]:
        return [text for part in got.events("lines") for _, text in part["lines"]]

    async def talk() -> None:
        first = asyncio.create_task(site.ask(path, until=lambda got: "the end" in lines(got)))
        second = asyncio.create_task(site.ask(path, until=lambda got: "the end" in lines(got)))
        pages = asyncio.create_task(
            site.ask(f"/api/events?e={RUN}", until=lambda got: len(got.events("page")) > 1)
        )
        await until(lambda: site.board.tails and next(iter(site.board.tails.values()))[0].count)
        await until(lambda: site.board.streams == 3)
        assert len(site.board.tails) == 1
        with log.open("a") as file:
            file.write("half a ")
        with log.open("a") as file:
            file.write("line\nthe end\n")
        for got in await asyncio.gather(first, second):
            assert lines(got) == ["hello from beta", "half a line", "the end"]
        topic = site.board.pages[RUN,]
        await until(lambda: topic.version == 1)
        metrics = made.path / "outputs" / "rank_00_metrics.jsonl"
        with metrics.open("a") as file:
            file.write(json.dumps({**line(0, 6, 2), "loss": 0.125}) + "\n")
        await pages
        packed = await site.ask(
            f"/api/page?e={RUN}", headers={**site.own, "accept-encoding": "gzip"}
        )
        assert packed.headers["content-encoding"] == "gzip" and packed.body == topic.value
        (loss, *_) = json.loads(gzip.decompress(topic.value))["data"]["charts"]
        assert loss["lines"][0]["means"][-1] == 0.125
        await until(lambda: not topic.readers and not site.board.streams)

    asyncio.run(talk())


def test_a_slow_client_gets_the_newest_state(site: Site) -> None:
    async def talk() -> None:
        states = iter(range(1000))
        topic = Topic(lambda: str(next(states)).encode(), 3600, site.board.threads)
        stream = following(topic, "n", 0.2)
        first = await anext(stream)
        for _ in range(50):
            await topic.once()
        assert first != await anext(stream) == b"event: n\ndata: 50\n\n"
        assert await anext(stream) == b": still here\n\n"  # and not once for each that it missed
        await stream.aclose()  # type: ignore[attr-defined]
        assert not topic.readers

    asyncio.run(talk())


def test_many_who_ask_at_once_cost_one_look(site: Site) -> None:
    async def talk() -> None:
        looks = []

        def look() -> bytes:
            looks.append(1)
            begun.wait(PATIENCE)
            return b"7"

        begun = threading.Event()
        topic = Topic(look, 3600, site.board.threads)
        asked = [asyncio.create_task(topic.fresh(3600)) for _ in range(20)]
        await until(lambda: looks)
        begun.set()
        assert await asyncio.gather(*asked) == [b"7"] * 20 and len(looks) == 1
        await topic.fresh(-1)
        assert len(looks) == 2

    asyncio.run(talk())


def test_clients_that_come_at_once_share_what_is_read(site: Site) -> None:
    experiment(site.root / RUN, **RUNNING)

    async def talk() -> None:
        logs_of = await asyncio.gather(*(site.board.tail(RUN, 0) for _ in range(5)))
        assert len({id(own) for own, _ in logs_of}) == 1
        assert len({id(topic) for topic in await asyncio.gather(*pages())}) == 1

    def pages() -> list[Any]:
        return [site.board.page([RUN]) for _ in range(5)]

    asyncio.run(talk())


@pytest.mark.slow
def test_one_that_is_removed_while_it_is_looked_at_is_said(site: Site) -> None:
    made = experiment(site.root / RUN, **RUNNING)

    async def talk() -> None:
        def gone(got: Got) -> bool:
            if got.events("page") == [1] and made.path.exists():
                made.path.rename(site.root / "elsewhere")
            return len(got.events("page")) > 1

        await site.ask(f"/api/experiments/{RUN}/events", until=gone)
        got = await site.ask(f"/api/page?e={RUN}")
        assert got.code == 409 and "it was removed" in got.json["error"]
        problem = Topic(made.read_record, 3600, site.board.threads)  # type: ignore[arg-type]
        stream = following(problem, "n", 60)
        assert b"event: problem" in await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(talk())


def test_nothing_grows_without_bound(site: Site) -> None:
    names = [f"r{i}_20260101_{i:06d}" for i in range(MOST_TOPICS + 5)]
    for name in names:
        experiment(site.root / name, steps=0)
    for name in names:
        assert site.get(f"/api/page?e={name}").code == 200
    assert len(site.board.pages) <= MOST_TOPICS
    site.board.streams = MOST_STREAMS
    assert site.get("/api/events").code == 503
    many = "&".join(f"e={name}" for name in names[:9])
    assert site.get(f"/api/page?{many}").code == 400


def test_a_log_that_is_too_quick_is_shown_from_its_end(tmp_path: Path) -> None:
    made = experiment(tmp_path / RUN, **RUNNING)
    log = made.log(made.read_record().nodes[0])
    tail = log_tail.Tail(log_tail.log_of(made, 0))  # type: ignore[arg-type]
    made.ranks(made.read_record().nodes[0]).write_text(f"{log.stat().st_size} ~\n")
    with log.open("a") as file:
        file.write("torchrun's farewell, which no terminal shows\n")
    assert tail.advance() and tail.since(0)["lines"] == [("-", "hello from alpha")]
    made.ranks(made.read_record().nodes[0]).unlink()
    with log.open("w") as file:
        file.writelines(f"line {i} {'x' * 5000 if i % 1000 == 0 else ''}\n" for i in range(300_000))
    tail.advance()
    told = tail.since(1)
    assert len(told["lines"]) <= log_tail.KEPT_LINES and told["lines"][-1][1] == "line 299999 "
    assert (
        told["left_out"] > 0
        and max(len(text) for _, text in told["lines"]) <= log_tail.LONGEST_CHARACTERS
    )


def test_a_log_goes_on_where_the_next_attempt_writes_it(tmp_path: Path) -> None:
    made = experiment(tmp_path / RUN, **RUNNING)
    tail = log_tail.tail_of(made, 0)
    assert tail is not None and log_tail.tail_of(made, 7) is None
    tail.advance()
    record = made.read_record()
    spare = dataclasses.replace(record.nodes[0], name="gamma", address="gamma")
    made.write_record(dataclasses.replace(record, nodes=[spare, record.nodes[1]]))
    made.log(spare).write_text("hello from gamma\n")
    tail.advance()
    made.log(spare).write_text("again\n")  # queued again: its logs were put aside
    assert tail.advance() and not tail.advance()
    told = [text for _, text in tail.since(0)["lines"]]
    assert told == [
        *("hello from alpha", "... from here on gamma", "hello from gamma"),
        *("... the log starts from the beginning", "again"),
    ]


def test_a_log_that_may_not_be_read_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    made = experiment(site.root / RUN, **RUNNING)
    tail = log_tail.tail_of(made, 0)
    monkeypatch.setattr(logs, "places_in", refuse)
    found = logs.search(made, "hello")
    assert found["unread"] == "node 0 (Permission denied), node 1 (Permission denied)"
    monkeypatch.undo()
    monkeypatch.setattr("orchestrator.head.screen.log_reader._read", refuse)
    assert tail is not None and tail.advance() and not tail.advance()
    assert "Permission denied" in tail.since(0)["lines"][0][1]


# -- search -----------------------------------------------------------------------------------


def test_search_finds_every_node_and_rank(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", 64)  # words lie across the blocks
    made = experiment(site.root / RUN, **RUNNING)
    first, second = made.read_record().nodes
    made.log(first).write_text("".join(f"step {i} NEEDLE {i}\n" for i in range(100)))
    text = "one\nneedle of rank 3\n" + "y" * 5000 + "needle" + "y" * 5000 + "\n"
    made.log(second).write_text(text)
    made.ranks(second).write_text("0 2\n4 3\n")
    found = site.get(f"/api/experiments/{RUN}/search?q=Needle").json
    assert (found["count"], found["whole"]) == (102, True)
    of_first = [hit["line"] for hit in found["hits"] if hit["node"] == 0]
    assert of_first == [f"step {i} NEEDLE {i}" for i in range(50, 100)]
    short, long = (hit for hit in found["hits"] if hit["node"] == 1)
    assert short == {"node": 1, "rank": "3", "line": "needle of rank 3"}
    assert "needle" in long["line"] and len(long["line"]) <= log_tail.LONGEST_CHARACTERS
    assert site.get(f"/api/experiments/{RUN}/search?q=(.*").json["count"] == 0
    assert site.get(f"/api/experiments/{RUN}/search?q=+").code == 400


def test_records_that_did_not_change_are_not_read_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiment(site.root / RUN, steps=0)
    read = []
    before = Experiment.read_record
    monkeypatch.setattr(Experiment, "read_record", lambda each: read.append(1) or before(each))
    for _ in range(3):
        assert site.board.listing.rows()[0].state == "done"
    assert len(read) == 1
    made.write_record(dataclasses.replace(before(made), state="failed"))
    assert site.board.listing.rows()[0].state == "failed"


def test_a_host_that_is_none_is_a_sentence() -> None:
    for host in ("a..b", "x" * 70, "999.1.1.1"):
        with pytest.raises(UsageError, match=f"--host {re.escape(host)}: "):
            listen(host, 0)


def test_a_port_that_is_taken_is_said_once() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"^127.0.0.1 port {port}: Address already in use\n"):
            listen("127.0.0.1", port)
