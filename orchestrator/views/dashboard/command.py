"""`orchestrator dashboard`: live pages of all experiments, for a browser."""

from __future__ import annotations

import contextlib
import html
import subprocess
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from orchestrator.common import files, interrupt
from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.hosts import host_in_url, is_loopback
from orchestrator.common.program import installed_command
from orchestrator.config.launch import Where
from orchestrator.head.connect import fleet
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen.events import say
from orchestrator.head.status.status import transport_without_record
from orchestrator.views.dashboard.app import Board, Guard, dashboard_app
from orchestrator.views.serve import listen_on_port, serve_app
from orchestrator.views.top.sample import TopSample, Watch

PORT = 8321
# How much of the output of `orchestrator stop` is kept.
LONGEST_ANSWER_BYTES = 20_000
# The pause between two samples of the nodes, and the time after which no page shows them.
LOOK_SECONDS, IDLE_SECONDS = 2.0, 30.0


def dashboard(
    where: Where, host: str, port: int | None, names: Sequence[str], *, opened: bool
) -> int:
    """Serve the pages until Ctrl-C."""
    listening = listen_on_port(host, *([PORT, 0] if port is None else [port]))
    port = listening.getsockname()[1]
    guard = Guard(port, frozenset(name.lower() for name in (host, *names)))
    url = f"http://{host_in_url(host)}:{port}/?token={guard.token}"
    say(f"open {url}")
    if is_loopback(host):
        say(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the same"
        )
    else:
        say("anyone with this address can see and stop jobs; the connection is not encrypted")
    if opened and not webbrowser.open(redirect_page(url, port).as_uri()):
        say("no browser could be started here")
    with closing(ClusterWatch(where)) as watch:
        serve_app(
            dashboard_app(Board(where, guard, partial(stop_job, where), watch.newest)), listening
        )
    return EXIT_DONE


class ClusterWatch:
    """Asks the nodes in a thread while a page shows them, and keeps the newest sample."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.lock = threading.Lock()
        self.sample: TopSample | None = None
        self.wanted_until = 0.0
        self.over = threading.Event()

    def newest(self) -> TopSample:
        """Return the newest sample; the first one says that the nodes are connected to."""
        with self.lock:
            self.wanted_until = time.monotonic() + IDLE_SECONDS
            if self.sample is None:
                transport = transport_without_record(self.where)
                watch = Watch(transport, read_nodes(self.where.node_list), self.where)
                watch.patience = LOOK_SECONDS
                self.sample = watch.seen()
                fleet.start_thread(partial(self.run, watch))
            return self.sample

    def run(self, watch: Watch) -> None:
        with closing(watch):
            while time.monotonic() < self.wanted_until and not self.over.is_set():
                self.sample = watch.observe()
                self.over.wait(LOOK_SECONDS)
        self.sample = None

    def close(self) -> None:
        self.over.set()


def redirect_page(url: str, port: int) -> Path:
    """Return a private page that redirects there: all users can read a browser's command line."""
    page = Path(files.our_directory(), f"dashboard-{port}.html")

    def remove() -> None:
        with contextlib.suppress(OSError):
            page.unlink()

    page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    interrupt.call_before_exit(remove)
    files.replace_file(page, f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
    return page


def stop_job(where: Where, name: str) -> str:
    """Stop a job as the command does, in a process of its own; return its output."""
    words = [*installed_command("orchestrator"), "stop"]
    words += ["--experiments", str(where.experiments.absolute())]
    if where.ssh_config is not None:
        words += ["--ssh-config", str(where.ssh_config.absolute())]
    if where.connect_timeout is not None:
        words += ["--connect-timeout", str(where.connect_timeout)]
    if where.trust_record:
        words.append("--trust-record")
    done = subprocess.run(
        # After `--`, a name that begins with a dash is no option.
        [*words, "--", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in this terminal does not interrupt a stop that was requested.
        start_new_session=True,
        check=False,
    )
    return done.stdout[-LONGEST_ANSWER_BYTES:].decode("utf-8", "replace").strip()
