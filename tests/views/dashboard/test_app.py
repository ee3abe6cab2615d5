"""The server's answers: to strangers, about every kind of experiment, while files grow."""

import dataclasses
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.protocol.requests.claims import ClaimEntry
from orchestrator.views.dashboard.app import MOST_PAGES, Guard
from orchestrator.views.dashboard.command import ClusterWatch, stop_job
from orchestrator.views.serve import listen_on_port
from tests.node.running import wait_until
from tests.views.dashboard.client import Site
from tests.views.report.reports import experiment, line
from tests.views.report.test_members import ENDS, swept
from tests.views.report.test_page import EVIL, Parts, drawn

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


# -- strangers --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", f"/experiment/{RUN}", "/static/page.js", "/compare?e=x"])
def test_requests_without_token_are_refused(site: Site, path: str) -> None:
    wrong = [{}, {"cookie": f"{site.guard.cookie}=x"}, {"authorization": "Bearer \u00e9"}]
    for headers in wrong:
        got = site.ask(path, headers=headers)
        assert got.code == 401 and str(site.root) not in got.text
    got = site.ask(f"/?token=x{site.guard.token}")
    assert got.code == 401 and "set-cookie" not in got.headers
    assert site.get(path, host="evil.example.com").code == 421
    # Two machines' dashboards on their usual port, both behind ssh -L to one browser.
    assert Guard(8321).cookie != Guard(8321).cookie and Guard(1).token != Guard(1).token


NAMES = (
    *("..", "../../etc/passwd", "..%2f..", f"{RUN}/../x", "\\..\\", "//evil.example", "*", ""),
    *("\x00", f"{RUN}\x00", "a" * 5000, "\ufffd", "\n", "<script>", "((((((", "\u0130"),
)


@pytest.mark.parametrize(
    "route",
    ["/{}", "/experiment/{}", "/experiment/{}/stop", "/static/{}", "/compare?e={}", "/?token={}"],
)
def test_invalid_names_are_refused_without_traceback(site: Site, route: str) -> None:
    experiment(site.root / RUN)
    secret = experiment(site.root.parent / "secret_20260101_000000")
    (site.root / "link_20260101_000000").symlink_to(secret.path)
    for name in (*NAMES, "../secret_20260101_000000", "link_20260101_000000"):
        for method in ("GET", "POST"):
            got = site.ask(route.format(name), method, site.own)
            assert got.code < 500 and not re.search("Traceback|hello from", got.text), (
                method,
                name,
            )


def test_token_becomes_cookie(site: Site) -> None:
    got = site.ask(f"/?token={site.guard.token}")
    cookie = got.headers["set-cookie"]
    assert got.code == 200 and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert site.guard.token not in cookie + got.text and 'content="0;url=/"' in got.text
    assert site.ask("/", headers={"cookie": cookie.partition(";")[0]}).code == 200
    got = site.ask(f"//evil.example/x?token={site.guard.token}")
    # The path is on this server.
    assert "url=/evil.example/x" in got.text


def test_every_answer_has_security_headers(site: Site) -> None:
    for got in (site.get("/"), site.get("/nothing"), site.ask("/")):
        fixed = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        assert got.headers.items() >= fixed.items()
        policy = got.headers["content-security-policy"]
        assert "script-src 'self'" in policy and "unsafe" not in policy


# -- stop -------------------------------------------------------------------------------------


def test_stop_runs_no_local_file_and_takes_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the directory was run')")
    (tmp_path / "experiments").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    name = f"--ssh-config={RUN}"
    answer = stop_job(Where(experiments=Path("experiments")), name)
    assert f"there is no experiment '{name}'" in answer


@pytest.mark.parametrize(
    ("form", "headers", "code"),
    [
        ("", {}, 403),
        ("session", {}, 403),
        ("form", {"sec-fetch-site": "cross-site"}, 403),
        ("form", {"origin": "http://localhost:9999"}, 403),
        ("form", {"origin": "null"}, 403),
        ("", {"authorization": "Bearer TOKEN", "origin": "https://evil.example"}, 403),
        ("form", {"cookie": "x=y"}, 401),
        ("form", {"origin": "http://localhost:8321", "sec-fetch-site": "same-origin"}, 303),
        ("", {"authorization": "Bearer TOKEN"}, 303),
    ],
)
def test_stop_needs_form_token_or_bearer(
    site: Site, form: str, headers: dict[str, str], code: int
) -> None:
    experiment(site.root / RUN, steps=0, **RUNNING)
    body = b"form=" + (site.guard.derived(form).encode() if form else b"")
    given = {name: value.replace("TOKEN", site.guard.token) for name, value in headers.items()}
    path = f"/experiment/{RUN}/stop"
    assert site.ask(path, "POST", {**site.own, **given}, body).code == code
    if code == 303:
        wait_until(lambda: "nothing left" in site.get(f"/experiment/{RUN}").text, patience=60)
    assert site.stopped == [RUN] * (code == 303)
    assert site.get(path).code == 405  # a link, a picture


def test_ended_job_cannot_be_stopped(site: Site) -> None:
    experiment(site.root / RUN, steps=0)
    bearer = {"authorization": f"Bearer {site.guard.token}"}
    assert site.ask(f"/experiment/{RUN}/stop", "POST", bearer).code == 409
    assert "Stop this job" not in site.get(f"/experiment/{RUN}").text


# -- what is there ----------------------------------------------------------------------------


def test_every_kind_of_experiment_is_shown(site: Site) -> None:
    experiment(site.root / "a_20260101_000000")
    experiment(site.root / "b_20260102_000000", state="failed", exit_code=1, verdict=CAUSE)
    experiment(site.root / "c_20260103_000000", steps=0, **RUNNING)
    experiment(site.root / "d_20260104_000000", steps=40, **RUNNING)
    (experiment(site.root / "e_20260105_000000").path / "job.json").write_text("{")
    text = site.get("/").text
    rows = [" ".join(Parts(row).words.split()) for row in text.split("<tr>")[2:]]
    assert [row[0] for row in rows] == ["e", "d", "c", "b", "a"]
    assert "damaged" in rows[0] and "not JSON" in rows[0]
    assert "running 40" in rows[1] and "rank 2 +29%" in rows[1]
    assert "an exception: ValueError: 3 failed" in rows[3]
    for name in ("a_20260101", "b_20260102", "c_20260103", "d_20260104"):
        got = site.get(f"/experiment/{name}_000000")
        assert got.code == 200 and name in got.text
    assert "nothing to draw" in site.get("/experiment/c_20260103_000000").text
    got = site.get("/experiment/e_20260105_000000")
    assert got.code == 409 and "not the record of a job" in got.text
    both = Parts(site.get("/compare?e=a_20260101_000000&e=d_20260104_000000").text)
    (loss, *_) = json.loads(both.scripts[-1])["charts"]
    assert [each["name"] for each in loss["lines"]] == ["a_20260101_000000", "d_20260104_000000"]
    assert "What differs" in both.words
    many = "&".join(f"e={name}" for name in range(9))
    assert site.get(f"/compare?{many}").code == site.get("/compare").code == 400


def test_every_page_of_the_bar_is_shown(site: Site) -> None:
    one, *others = site.sample.nodes
    waits = ClaimEntry(id="b", state="waiting", job="next", since=2.0, wants=2, user="bob")
    site.sample = replace(site.sample, nodes=(replace(one, claims=(waits,)), *others))
    sweep = swept(site.root, [{"lr": "1e-4"}, {"lr": "<b>"}], ENDS)
    (broken := site.root / "s_20260101_000000").mkdir()
    (broken / "sweep.json").write_text("{")
    for path, words in {
        "/": ["There is no experiment here yet"],
        "/sweeps": [sweep.name, "1 done, 1 failed", "val_loss 2", "s_20260101_000000", "changed"],
        f"/sweep/{sweep.name}": ["Members", "<b>", "the best so far"],
        "/cluster": ["2 of 3 nodes", "it does not answer", "10 of 40", "1 queued"],
        "/queue": ["waits, 1.", "bob", "next", "2 wanted"],
        "/experiment/none": ["This page cannot be shown", "there is no experiment 'none' here"],
    }.items():
        parts = Parts(site.get(path, accept="text/html").text)
        assert all(word in parts.words for word in words), (path, parts.words)
        links = {value for key, value in parts.attributes if key == "href"}
        assert {"/", "/sweeps", "/cluster", "/queue"} <= links
        members = {"/experiment/sweep-0", "/experiment/sweep-1"}
        assert (members <= links) is (sweep.name in path)
        assert (f"/sweep/{sweep.name}" in links) is (path == "/sweeps")


def test_nodes_are_asked_while_a_page_shows_them(tmp_path: Path) -> None:
    # No server listens on this port.
    (tmp_path / "nodes.txt").write_text("127.0.0.1:1\n")
    where = Where(nodes=tmp_path / "nodes.txt", experiments=tmp_path)
    with closing(ClusterWatch(where)) as watch:
        assert watch.newest().nodes[0].problem == "connecting ..."
        wait_until(lambda: "refuse" in watch.newest().nodes[0].problem, patience=60)
        watch.wanted_until = 0.0
        wait_until(lambda: watch.sample is None, patience=60)
        assert watch.newest().nodes[0].problem == "connecting ..."


def test_damaged_experiment_hides_no_other(site: Site) -> None:
    experiment(site.root / "a_20260101_000000")
    experiment(site.root / "b_20260102_000000", state="failed", verdict={"title": 5})
    told = experiment(site.root / "c_20260103_000000", **RUNNING)
    spent = {"attempt": 1, "began": 1.7e9, "trains": 1.7e9, "first": 0, "time": float("nan"),
             "step": 5, "data": 0, "checkpoints": 0}  # fmt: skip
    (told.path / "outputs" / "time_spent.jsonl").write_text(json.dumps(spent) + "\n")
    words = Parts(site.get("/").text).words
    shown = ("damaged", "title must be text", *(f"{name}_2026010" for name in "abc"))
    assert [word for word in shown if word not in words] == []


def test_text_of_nodes_is_escaped(site: Site) -> None:
    made = experiment(site.root / RUN, steps=20, state="failed", verdict={**CAUSE, "title": EVIL})
    record = made.read_record()
    nodes = [dataclasses.replace(node, name=EVIL, state=EVIL) for node in record.nodes]
    evil = {**CAUSE, "message": EVIL, "fix": EVIL}
    made.write_record(dataclasses.replace(record, nodes=nodes, command=["x", EVIL], verdict=evil))
    made.write("config.yaml", EVIL)
    made.log(nodes[0]).write_text(EVIL + "\n")
    metrics = made.path / "outputs" / "rank_00_metrics.jsonl"
    metrics.write_text("".join(json.dumps({**line(0, s, 2), EVIL: 1.0}) + "\n" for s in (1, 2, 3)))
    for path in ("/", f"/experiment/{RUN}"):
        parts = Parts(site.get(path).text)
        assert parts.tags.count("script") == 4 and "img" not in parts.tags  # files and data
        assert not [key for key, _ in parts.attributes if key and key.startswith("on")]
        assert EVIL in parts.words
    script = site.get("/static/live.js").text
    assert script.count("innerHTML = ") == 1 and "insertAdjacentHTML" not in script


# -- while it grows ---------------------------------------------------------------------------


def test_new_data_is_served_and_unchanged_is_not_resent(site: Site) -> None:
    made = experiment(site.root / RUN, steps=5, **RUNNING)
    path = f"/experiment/{RUN}"
    first = site.get(path)
    etag = first.headers["etag"]
    assert site.get(path, **{"if-none-match": etag}).code == 304
    made.log(made.read_record().nodes[1]).write_text("the end\n")
    with (made.path / "outputs" / "rank_00_metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line(0, 6, 2), "loss": 0.125}) + "\n")
    assert site.get(path, **{"if-none-match": etag}).code == 304, "it was rendered a moment ago"
    site.board.pages[RUN,].until = 0.0
    got = site.get(path, **{"if-none-match": etag})
    assert got.code == 200 and "the end" in got.text
    assert drawn(Parts(got.text), -1)["charts"][0]["lines"][0]["means"][-1] == 0.125
    (site.root / RUN).rename(site.root / "elsewhere")
    assert site.get(path).code == 404


def test_number_of_cached_pages_is_bounded(site: Site) -> None:
    names = [f"r{i}_20260101_{i:06d}" for i in range(MOST_PAGES + 5)]
    for name in names:
        experiment(site.root / name, steps=0)
        assert site.get(f"/experiment/{name}").code == 200
    assert len(site.board.pages) == MOST_PAGES


def test_invalid_host_or_taken_port_is_refused() -> None:
    for host in ("a..b", "x" * 70, "999.1.1.1"):
        with pytest.raises(UsageError, match=f"--host {re.escape(host)}: "):
            listen_on_port(host, 0)
    with listen_on_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"^127.0.0.1 port {port}: Address already in use\n"):
            listen_on_port("127.0.0.1", port)
        with listen_on_port("127.0.0.1", port, 0) as other:
            assert other.getsockname()[1] != port
