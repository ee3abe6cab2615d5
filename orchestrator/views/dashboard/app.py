"""The dashboard: the report's pages of all experiments, rendered again when their files change."""

from __future__ import annotations

import hashlib
import hmac
import html
import os
import secrets
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from orchestrator.common.errors import UsageError
from orchestrator.common.hosts import is_this_machine
from orchestrator.config.launch import Where
from orchestrator.head.commands import ls
from orchestrator.head.commands.machines import nodes as machines
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep.journal import Journal
from orchestrator.head.screen.output import Column, Table
from orchestrator.head.status import comparison, row
from orchestrator.records import experiments
from orchestrator.records.experiment import RECORD, Experiment
from orchestrator.views.report import members, page, run_data
from orchestrator.views.report.members import Members
from orchestrator.views.report.page import PageTable
from orchestrator.views.top import table
from orchestrator.views.top.sample import JobSample, TopSample

# Only the newest are listed; the commands find older ones.
MOST_LISTED = 200
# The cache keeps the last pages that were rendered.
MOST_PAGES = 12
MOST_COMPARED = 8
FORM_BYTES = 1 << 12
# A page is not rendered again within this time.
LOOK_SECONDS = 2.0
# A page that took long to render is kept for this many times as long: at most 9% of a core.
SLOWEST = 10.0


@dataclass
class Rendered:
    """A rendered page, the state of its files, and how long it is served as it is."""

    body: bytes
    stamp: object
    until: float


@dataclass
class Board:
    """All state that the clients of one server share."""

    where: Where
    guard: Guard
    # Stops a job, and returns its receipts as text.
    stop: Callable[[str], str]
    # Returns the newest sample of all nodes.
    sample: Callable[[], TopSample]
    pages: dict[tuple[str, ...], Rendered] = field(default_factory=dict)
    # From a name to the result of its stop.
    stopping: dict[str, str] = field(default_factory=dict)
    # Held so that one page is rendered at a time.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="stop")

    def find(self, name: str) -> Experiment:
        """Return an experiment by its name; no path leads out of the directory."""
        for each in experiments.list_experiments(self.where):
            if each.name == name:
                return each
        raise HTTPException(404, f"there is no experiment {name!r} here")

    def answer(
        self, request: Request, key: tuple[str, ...], stamp: object, render: Callable[[], str]
    ) -> Response:
        """Return a page, rendered again if its files changed; 304 if the client has it already."""
        with self.lock:
            known, now = self.pages.pop(key, None), time.monotonic()
            if known is None or (known.stamp != stamp and now > known.until):
                body = render().encode()
                end = time.monotonic()
                known = Rendered(body, stamp, end + max(LOOK_SECONDS, SLOWEST * (end - now)))
            self.pages[key] = known
            if len(self.pages) > MOST_PAGES:
                del self.pages[next(iter(self.pages))]
        headers = {"etag": f'"{zlib.crc32(known.body):08x}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(known.body, headers=headers, media_type="text/html")

    # -- pages -------------------------------------------------------------------------------

    def home(self, request: Request) -> Response:
        def render() -> str:
            root = self.where.experiments
            newest = experiments.list_experiments(self.where)[: -MOST_LISTED - 1 : -1]
            own: dict[str, Any] = {"root": str(root.absolute()), "sweeps": self.sweeps()}
            rows = [ls.row_of(each, None) for each in newest]
            return page.fill_template("list.html", live=True, here="Experiments", rows=rows, **own)

        return self.answer(request, (), time.monotonic(), render)

    def experiment(self, request: Request) -> Response:
        return self.page_of(request, [request.path_params["name"]])

    def sweeps(self) -> dict[str, Journal]:
        """Return the newest sweeps by their names, the newest first."""
        found = self.where.experiments.glob(f"*/{journals.SWEEP}")
        paths = [path.parent for path in found if not path.parent.is_symlink()]
        newest = sorted(paths, key=lambda path: path.name[-15:], reverse=True)[:MOST_LISTED]
        return {path.name: Journal(path.absolute()) for path in newest}

    def list_sweeps(self, request: Request) -> Response:
        def render() -> str:
            rows = [sweep_of(each) for each in self.sweeps().values()]
            none = "There is no sweep here yet: orchestrator sweep starts one."
            part = PageTable("", SWEEPS, rows, none, lambda one: f"/sweep/{quote(one.name)}")
            return filled_tables("Sweeps", str(self.where.experiments.absolute()), part)

        return self.answer(request, ("", "sweeps"), time.monotonic(), render)

    def sweep(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (journal := self.sweeps().get(name)) is None:
            raise HTTPException(404, f"there is no sweep {name!r} here")

        def render() -> str:
            return page.page_of_members(members.read_members(journal), live=True, here="Sweeps")

        return self.answer(request, ("", "sweep", name), time.monotonic(), render)

    def cluster(self, request: Request) -> Response:
        """Return the page of the nodes and their jobs, as `orchestrator top` shows them."""
        sample = self.sample()

        def address(job: JobSample) -> str:
            return f"/experiment/{quote(job.experiment)}" if job.experiment else ""

        jobs = table.job_table(sample.time)
        nodes = PageTable("Nodes", table.NODES, sample.nodes, "")
        parts = nodes, PageTable("Jobs", jobs, sample.jobs, "No job is seen there.", address)
        return HTMLResponse(filled_tables("Cluster", table.totals_line(sample, None), *parts))

    def queue(self, request: Request) -> Response:
        """Return the page of what `orchestrator nodes --queue` shows."""
        sample = self.sample()
        lines = list(machines.lines_of((node.name, node.claims) for node in sample.nodes))
        part = PageTable("", machines.LINES, lines, "No job holds these nodes or waits for them.")
        return HTMLResponse(filled_tables("Queue", table.totals_line(sample, None), part))

    def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("e")))
        if not 1 <= len(names) <= MOST_COMPARED:
            raise HTTPException(400, f"choose 1 to {MOST_COMPARED} experiments (?e=NAME&e=NAME)")
        return self.page_of(request, names)

    def page_of(self, request: Request, names: Sequence[str]) -> Response:
        found = [self.find(name) for name in names]
        several = len(found) > 1
        stopping = "" if several else self.stopping.get(names[0], "")

        def render() -> str:
            reports = [run_data.read_run_data(each, len(found) - 1) for each in found]
            differences = comparison.compare_experiments(found) if several else {}
            own: dict[str, Any] = {"live": True, "form": self.guard.form, "stopping": stopping}
            own |= {"here": "Experiments", "sweeps": self.sweeps()}
            return page.report_page(reports, differences, **own)

        stamp = (stopping, [fingerprint(each) for each in found])
        return self.answer(request, tuple(names), stamp, render)

    # -- stop --------------------------------------------------------------------------------

    async def stop_job(self, request: Request) -> Response:
        name = request.path_params["name"]
        if int(request.headers.get("content-length", "0") or 0) > FORM_BYTES:
            raise HTTPException(413)
        form = parse_qs((await request.body()).decode("utf-8", "replace")).get("form", [""])[0]
        if not self.guard.may_change(request, form):
            raise HTTPException(403, "this did not come from a page of this server")
        record = (await run_in_threadpool(self.find, name)).read_record()
        if record.over:
            raise HTTPException(409, "it is over already")
        if self.stopping.get(name) != BEING_STOPPED:
            self.stopping[name] = BEING_STOPPED
            self.threads.submit(self.run_stop, name)
        return RedirectResponse(f"/experiment/{quote(name)}", 303)

    def run_stop(self, name: str) -> None:
        try:
            self.stopping[name] = self.stop(name)
        except (OSError, UsageError) as error:
            self.stopping[name] = str(error)


BEING_STOPPED = "it is being stopped ..."


def filled_tables(name: str, words: str, *parts: PageTable) -> str:
    """Return a page of the bar that has tables alone."""
    return page.fill_template("tables.html", live=True, here=name, words=words, tables=parts)


def sweep_of(journal: Journal) -> Members:
    try:
        return members.read_members(journal)
    except row.TROUBLE as error:
        return Members(journal.name, "", "", 0.0, 0, (), journal.path, trouble=str(error))


def best_of(sweep: Members) -> str:
    """Return the best value of the metric so far, and the values that gave it."""
    first = next((one for one in sweep.every if one.is_known and sweep.best), None)
    return "-" if first is None else f"{sweep.metric} {first.value:.6g}: {first.words}"


SWEEPS: Table[Members] = Table(
    (
        Column("SWEEP", lambda sweep: sweep.name),
        Column("MEMBERS", lambda sweep: sweep.trouble or sweep.summary()),
        Column("BEST", best_of),
        Column("STARTED", lambda sweep: page.clock_text(sweep.began)[:16] if sweep.began else "-"),
    )
)


def fingerprint(experiment: Experiment) -> object:
    """Return a value that changes with the record, a metrics file or a log of an experiment."""
    stamps = []
    try:
        for directory in ("", "outputs", "logs"):
            for entry in os.scandir(experiment.path / directory):
                if directory or entry.name == RECORD:
                    status = entry.stat(follow_symlinks=False)
                    stamps.append((entry.path, status.st_size, status.st_mtime_ns))
    except OSError:
        return None
    return sorted(stamps)


async def told(request: Request, error: Exception) -> Response:
    code, words = 409, str(error) if isinstance(error, UsageError) else "its files cannot be read"
    if isinstance(error, HTTPException):
        code, words = error.status_code, error.detail
    # The script of a page takes text, and shows it in the bar.
    if "text/html" in request.headers.get("accept", ""):
        shown = page.fill_template("tables.html", live=True, here="", words=words, tables=())
        return HTMLResponse(shown, code)
    return PlainTextResponse(f"{words}\n", code)


# Exceptions of reading a damaged experiment.
DAMAGED = (HTTPException, UsageError, OSError, ValueError, KeyError, TypeError, AttributeError)


def dashboard_app(board: Board) -> Starlette:
    """Return the server of one board."""
    routes = [
        Route("/", board.home),
        Route("/experiment/{name}", board.experiment),
        Route("/experiment/{name}/stop", board.stop_job, methods=["POST"]),
        Route("/compare", board.compare),
        Route("/sweeps", board.list_sweeps),
        Route("/sweep/{name}", board.sweep),
        Route("/cluster", board.cluster),
        Route("/queue", board.queue),
        Mount("/static", StaticFiles(directory=page.WEB)),
    ]
    made = Starlette(routes=routes, exception_handlers=dict.fromkeys(DAMAGED, told))
    made.add_middleware(GZipMiddleware, minimum_size=1 << 12)
    made.add_middleware(BaseHTTPMiddleware, dispatch=board.guard)
    return made


# -- who may see the pages --------------------------------------------------------------------


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer" a form of our own pages would come from the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "Open the address that `orchestrator dashboard` printed: it has a token.\n"


@dataclass(frozen=True)
class Guard:
    """The secrets of one server, and the host names that it answers to."""

    port: int
    # Names beside localhost, this machine's own, and addresses.
    names: frozenset[str] = frozenset()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def cookie(self) -> str:
        """Return the name of the cookie, which differs by server.

        A browser sends the cookies of a host to all its ports. Two dashboards on the usual port of
        two machines have the same host behind ssh -L.
        """
        return f"orchestrator-{self.port}-{self.derived('cookie')[:8]}"

    @property
    def form(self) -> str:
        """Return the secret that forms of our pages send with a change."""
        return self.derived("form")

    def derived(self, what: str) -> str:
        return hmac.new(self.key, what.encode(), hashlib.sha256).hexdigest()

    async def __call__(
        self, request: Request, go_on: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request (as middleware): only clients that have the token get a page."""
        response = self.judge(request) or await go_on(request)
        response.headers.update(HEADERS)
        return response

    def judge(self, request: Request) -> Response | None:
        """Return the response to a client that may not pass; None for one that may."""
        if not is_this_machine(request.headers.get("host", ""), self.names):
            return PlainTextResponse("this server has another name; see --name\n", 421)
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self.enter(token, request.url.path)
        session = request.cookies.get(self.cookie, "")
        if not (same(session, self.derived("session")) or self.bears_token(request)):
            return PlainTextResponse(REFUSED, 401)
        return None

    def enter(self, token: str, path: str) -> Response:
        """Return a page that sets the session's cookie and then loads the requested page."""
        if not same(token, self.token):
            return PlainTextResponse(REFUSED, 401)
        url = html.escape("/" + quote(path.lstrip("/\\")))
        answer = HTMLResponse(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}">')
        session = self.derived("session")
        answer.set_cookie(self.cookie, session, httponly=True, samesite="strict", path="/")
        return answer

    def bears_token(self, request: Request) -> bool:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and same(token.strip(), self.token)

    def may_change(self, request: Request, form: str) -> bool:
        """Return True if a POST is from a page of this server, or from a script with the token."""
        headers = request.headers
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != headers.get("host", ""):
            return False
        return self.bears_token(request) or same(form, self.form)


def same(shown: str, wanted: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), wanted.encode())
