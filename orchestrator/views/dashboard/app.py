"""The pages and the JSON of the dashboard, over HTTP, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.common.errors import UsageError
from orchestrator.common.hosts import is_this_machine
from orchestrator.config.launch import Where
from orchestrator.records.experiment import Experiment
from orchestrator.views.dashboard import logs, pages
from orchestrator.views.dashboard.cluster import Cluster
from orchestrator.views.dashboard.guard import HEADERS, Guard
from orchestrator.views.dashboard.hub import Topic, either, event, following
from orchestrator.views.dashboard.listing import Listing
from orchestrator.views.dashboard.pages import Compared, Page
from orchestrator.views.places import TOKEN_SECONDS, Places
from orchestrator.views.report import page as report
from orchestrator.views.tail import Tail, tail_of

MOST_STREAMS = 100  # clients that look on at the same time
MOST_TOPICS = 12  # pages of experiments that are kept, the last that were looked at
MOST_TAILS = 64
MOST_COMPARED = 8
LIST_SECONDS, PAGE_SECONDS, LOG_SECONDS, CLUSTER_SECONDS = 1.0, 3.0, 0.5, 2.0
ALIVE_SECONDS = 15.0
THREADS = 3
NODE_NUMBER = re.compile("[0-9]{1,9}")
PORT = 8321
MOST_CLIENTS = 400  # connections of those who have shown the token
MOST_STRANGERS = 256  # and of all others
BACKLOG = 64  # connections that are taken before the first bytes of those before are read
ADMIT = "orchestrator.admit"  # what a request has shown counts for its connection
HTTP_OK = 200
GOODBYE_SECONDS = 1  # that clients have who look on when it ends

# Stops a job, and returns what its receipts say; it may take as long as the job's grace.
Stop = Callable[[str], Awaitable[str]]


@dataclass
class Board:
    """All that the clients of one server share."""

    listing: Listing
    guard: Guard
    compared: Compared
    stop: Stop
    cluster: Cluster = field(default_factory=lambda: Cluster(Where()))
    streams: int = 0
    pages: dict[tuple[str, ...], Topic] = field(default_factory=dict)
    tails: dict[tuple[str, int], tuple[Tail, Topic]] = field(default_factory=dict)
    stopping: dict[str, str] = field(default_factory=dict)  # name -> what became of it
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dashboard")
        self.searching = asyncio.Semaphore(1)
        self.list = Topic(self.render, LIST_SECONDS, self.threads)
        cluster = self.cluster
        self.nodes = Topic(cluster.render, CLUSTER_SECONDS, self.threads, cluster.close)

    def render(self) -> bytes:
        rows = [asdict(row) for row in self.listing.rows()]
        rows = [{**row.pop("progress"), **row} for row in rows]
        return json.dumps({"experiments": rows}, separators=(",", ":")).encode()

    async def find(self, name: str) -> Experiment:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.threads, self.listing.find, name)
        if found is None:
            raise Answer(404, f"there is no experiment {name!r} here")
        return found

    async def page(self, names: Sequence[str]) -> Topic:
        """Return the topic of one page; of those that nobody looks at, the oldest go."""
        key = tuple(names)
        if key not in self.pages:
            page = Page([await self.find(name) for name in names], self.compared)
            topic = Topic(page.render, PAGE_SECONDS, self.threads)
            self.pages.setdefault(key, topic)  # another client may have been quicker
            idle = [(each.used, k) for k, each in self.pages.items() if not each.readers]
            for _, old in sorted(idle)[: max(0, len(self.pages) - MOST_TOPICS)]:
                if old != key:
                    del self.pages[old]
        return self.pages[key]

    async def tail(self, name: str, node: int) -> tuple[Tail, Topic]:
        """Return the reader of one log; of those that nobody follows, none is kept."""
        for key in [k for k, (_, topic) in self.tails.items() if not topic.readers]:
            if key != (name, node):
                del self.tails[key]
        if (name, node) not in self.tails:
            if len(self.tails) >= MOST_TAILS:
                raise Answer(503, "too many logs are followed already")
            tail = tail_of(await self.find(name), node)
            if tail is None:
                raise Answer(404, f"{name} has no node {node}")

            def look() -> bytes:
                tail.advance()
                return str(tail.count).encode()

            topic = Topic(look, LOG_SECONDS, self.threads)
            self.tails.setdefault((name, node), (tail, topic))
        return self.tails[name, node]

    @contextlib.contextmanager
    def streaming(self) -> Any:
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    async def run_stop(self, name: str) -> None:
        try:
            self.stopping[name] = await self.stop(name)
        except (OSError, UsageError) as error:
            self.stopping[name] = str(error)


class Answer(Exception):
    """An answer that says why there is no better one."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code
        self.what = what


def app(board: Board) -> Starlette:
    """Make the server of one board."""
    handlers = Handlers(board)
    routes = [
        Route("/", handlers.home),
        Route("/experiment/{name}", handlers.experiment),
        Route("/compare", handlers.compare),
        Route("/cluster", handlers.cluster),
        Mount("/static", StaticFiles(directory=report.WEB, packages=[(__package__, "web")])),
        Route("/favicon.ico", handlers.icon),
        Route("/api/experiments", handlers.list),
        Route("/api/events", handlers.list_events),
        Route("/api/page", handlers.page),
        Route("/api/cluster", handlers.nodes),
        Route("/api/cluster/events", handlers.node_events),
        Route("/api/experiments/{name}/events", handlers.events),
        Route("/api/experiments/{name}/search", handlers.search),
        Route("/api/experiments/{name}/stop", handlers.stop, methods=["POST"]),
    ]
    made = Starlette(routes=routes, exception_handlers={Answer: told, UsageError: told})
    made.add_middleware(Guarded, guard=board.guard)
    return made


async def told(_: Request, error: Exception) -> Response:
    code = error.code if isinstance(error, Answer) else 404
    return JSONResponse({"error": str(error)}, code)


class Guarded:
    """Lets nobody pass whom the guard does not know, and adds the headers that each answer has."""

    def __init__(self, app: Any, guard: Guard) -> None:
        self.app = app
        self.guard = guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no websockets here

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        refusal = self.judge(Request(scope))
        if refusal is None or refusal.status_code == HTTP_OK:
            scope.get("extensions", {}).get(ADMIT, lambda: None)()
        else:
            refusal.headers["connection"] = "close"
        await (refusal or self.app)(scope, receive, with_headers)

    def judge(self, request: Request) -> Response | None:
        """Return the answer to one who may not pass; nothing for one who may."""
        guard, headers = self.guard, request.headers
        if not is_this_machine(headers.get("host", ""), guard.names):
            return Response("this server has another name; see --name\n", 421)
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self.enter(token, request.url.path)
        if not guard.knows(request.cookies, headers.get("authorization", "")):
            return HTMLResponse(pages.html("refused"), 401)
        if request.method not in ("GET", "HEAD") and not guard.may_change(headers):
            return Response("this did not come from a page of this server\n", 403)
        return None

    def enter(self, token: str, path: str) -> Response:
        if not self.guard.is_token(token):
            return HTMLResponse(pages.html("refused"), 401)
        # A page of ours asks for the one that was meant, and never for one of another server.
        answer = HTMLResponse(pages.html("entered", url="/" + quote(path.lstrip("/\\"))))
        answer.set_cookie(
            self.guard.cookie, self.guard.session, httponly=True, samesite="strict", path="/"
        )
        return answer


@dataclass(frozen=True)
class Handlers:
    """An answer to each kind of request."""

    board: Board

    # -- pages -------------------------------------------------------------------------------

    def html(self, kind: str, names: Sequence[str], **values: Any) -> Response:
        form = self.board.guard.form
        return HTMLResponse(pages.html(kind, names=names, form=form, **values))

    async def home(self, _: Request) -> Response:
        root = str(self.board.listing.root.absolute())
        return self.html("list", [], root=root)

    async def experiment(self, request: Request) -> Response:
        found = await self.board.find(request.path_params["name"])
        try:
            nodes = [(node.index, node.name) for node in found.read_record().nodes]
        except UsageError:
            nodes = []
        return self.html("experiment", [found.name], nodes=nodes)

    async def compare(self, request: Request) -> Response:
        names = chosen(request)
        for name in names:
            await self.board.find(name)
        return self.html("compare", names)

    async def cluster(self, _: Request) -> Response:
        return self.html("cluster", [], list=str(self.board.cluster.where.node_list))

    async def icon(self, _: Request) -> Response:
        return Response(status_code=204)

    # -- JSON --------------------------------------------------------------------------------

    async def list(self, _: Request) -> Response:
        return answer_of(self.board.list, await self.board.list.fresh(LIST_SECONDS))

    async def page(self, request: Request) -> Response:
        topic = await self.board.page(chosen(request))
        value = await topic.fresh(PAGE_SECONDS)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return answer_of(topic, gzip.decompress(value))
        answer = answer_of(topic, value)
        answer.headers["content-encoding"] = "gzip"
        return answer

    async def nodes(self, _: Request) -> Response:
        topic = self.board.nodes
        with topic.reading():  # which ends the connections, too
            return answer_of(topic, await topic.fresh(CLUSTER_SECONDS))

    async def node_events(self, _: Request) -> Response:
        return self.stream(following(self.board.nodes, "cluster", ALIVE_SECONDS))

    async def search(self, request: Request) -> Response:
        found = await self.board.find(request.path_params["name"])
        word = request.query_params.get("q", "")
        if not word.strip():
            raise Answer(400, "?q=WORD says what to find")
        async with self.board.searching:
            loop = asyncio.get_running_loop()
            hits = await loop.run_in_executor(self.board.threads, logs.search, found, word)
        return JSONResponse(hits)

    async def stop(self, request: Request) -> Response:
        board, found = self.board, await self.board.find(request.path_params["name"])
        if found.read_record().over:
            raise Answer(409, "it is over already")
        if any(task.get_name() == found.name for task in board.tasks):
            raise Answer(409, "it is being stopped already")
        board.stopping[found.name] = "it is being stopped ..."
        task = asyncio.get_running_loop().create_task(board.run_stop(found.name), name=found.name)
        board.tasks.add(task)
        task.add_done_callback(board.tasks.discard)
        return JSONResponse({"stopping": found.name}, 202)

    # -- events ------------------------------------------------------------------------------

    async def list_events(self, request: Request) -> Response:
        """Give the list whenever it is another; with ?e=NAME, say when the page of those is."""
        if "e" in request.query_params:
            names = chosen(request)
            return self.stream(changes(self.board, names[0], await self.board.page(names), None))
        return self.stream(following(self.board.list, "list", ALIVE_SECONDS))

    async def events(self, request: Request) -> Response:
        """Give what happens to an experiment, and with ?node=N the lines of that node's log."""
        name, node = request.path_params["name"], request.query_params.get("node", "")
        topic = await self.board.page([name])
        if node and not NODE_NUMBER.fullmatch(node):
            raise Answer(404, f"{name} has no node {node[:20]!r}")
        lines = await self.board.tail(name, int(node)) if node else None
        return self.stream(changes(self.board, name, topic, lines))

    def stream(self, parts: AsyncIterator[bytes]) -> Response:
        if self.board.streams >= MOST_STREAMS:
            raise Answer(503, f"{MOST_STREAMS} clients look on already")

        async def counted() -> AsyncIterator[bytes]:
            with self.board.streaming():
                yield b"retry: 2000\n\n"
                async with contextlib.aclosing(parts):  # type: ignore[type-var]
                    async for part in parts:
                        yield part

        return StreamingResponse(counted(), media_type="text/event-stream")


async def changes(
    board: Board, name: str, topic: Topic, lines: tuple[Tail, Topic] | None
) -> AsyncIterator[bytes]:
    """Say that the page has changed, what became of a stop, and give the new lines of a log."""
    version, number, said, alive = 0, 0, "", time.monotonic()
    with contextlib.ExitStack() as readers:
        readers.enter_context(topic.reading())
        if lines is not None:
            readers.enter_context(lines[1].reading())
        while True:
            events = (topic.changed, lines[1].changed if lines is not None else None)
            if topic.version != version:
                version = topic.version
                yield event("page", str(version).encode())
            if lines is not None and lines[0].count != number:
                fresh = lines[0].since(number)
                number = fresh["next"]
                yield event("lines", json.dumps(fresh).encode())
            if board.stopping.get(name, "") != said:
                said = board.stopping.get(name, "")
                yield event("stopping", json.dumps(said).encode())
            if time.monotonic() - alive > ALIVE_SECONDS:
                alive = time.monotonic()
                yield b": still here\n\n"
            await either(*events, 1.0)


def answer_of(topic: Topic, value: bytes) -> Response:
    if topic.problem or not value:
        raise Answer(409, topic.problem or "it cannot be read")
    return Response(value, media_type="application/json")


def chosen(request: Request) -> list[str]:
    names = list(dict.fromkeys(request.query_params.getlist("e")))
    if not 1 <= len(names) <= MOST_COMPARED:
        raise Answer(400, f"?e=NAME&e=NAME chooses 1 to {MOST_COMPARED} experiments")
    return names


# -- the socket -------------------------------------------------------------------------------


def listen(host: str, port: int | None) -> socket.socket:
    """Open the port; where none is wanted, the usual one or any that is free."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a machine"
        raise UsageError(f"--host {host}: {reason}", "give an address of this machine") from None
    for wanted in [PORT, 0] if port is None else [port]:
        try:
            return socket.create_server((host, wanted), family=family)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    raise UsageError(f"{host} port {port or PORT}: {problem}", "choose another: --port 0 takes any")


def serve(app: Starlette, listening: socket.socket) -> None:
    server(app).run(sockets=[listening])


def server(app: Starlette) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="error",  # any user of this machine can cause a warning
        access_log=False,  # the first address has the token
        server_header=False,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        limit_concurrency=MOST_CLIENTS + MOST_STRANGERS,
        backlog=BACKLOG,
    )
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """One connection: whoever has not shown the token in time is hung up on."""

    strangers: ClassVar = Places(MOST_STRANGERS)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.strangers.enter(self, transport.abort)
        self.late = self.loop.call_later(TOKEN_SECONDS, transport.abort)
        guarded = self.app

        async def introduced(scope: Any, receive: Any, send: Any) -> None:
            await guarded({**scope, "extensions": {ADMIT: self.admit}}, receive, send)

        self.app = introduced

    def admit(self) -> None:
        self.late.cancel()
        self.strangers.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.admit()
        super().connection_lost(exc)
