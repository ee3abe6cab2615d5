"""`orchestrator dashboard`: live pages of all experiments, for a browser."""

from __future__ import annotations

import asyncio
import contextlib
import html
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common import files, interrupt
from orchestrator.common.errors import EXIT_DONE
from orchestrator.common.hosts import in_url, is_loopback
from orchestrator.common.program import installed
from orchestrator.common.wings import needed
from orchestrator.config.launch import Where
from orchestrator.head.screen.output import say
from orchestrator.head.status.comparison import compared

LONGEST_ANSWER_BYTES = 20_000  # of what `stop` prints


def dashboard(
    where: Where, host: str, port: int | None, names: Sequence[str], *, opened: bool
) -> int:
    """Serve the pages until Ctrl-C."""
    with needed("dashboard"):
        from orchestrator.views.dashboard import app
    from orchestrator.views.dashboard.cluster import Cluster
    from orchestrator.views.dashboard.guard import Guard
    from orchestrator.views.dashboard.listing import Listing

    listening = app.listen(host, port)
    port = listening.getsockname()[1]
    guard = Guard(port, frozenset(name.lower() for name in (host, *names)))
    listing = Listing(where.experiments, where.trust_record)
    board = app.Board(listing, guard, compared, Stopping(where).stop, Cluster(where))
    url = f"http://{in_url(host)}:{port}/?token={guard.token}"
    say(f"open {url}")
    if is_loopback(host):
        say(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the same"
        )
    else:
        say("anyone with this address can see and stop jobs; the connection is not encrypted")
    if opened and not webbrowser.open(leading_to(url, port).as_uri()):
        say("no browser could be started here")
    app.serve(app.app(board), listening)
    return EXIT_DONE


def leading_to(url: str, port: int) -> Path:
    """Write a page for ourselves that leads there: all users can read a browser's command line."""
    page = Path(files.our_directory(), f"dashboard-{port}.html")

    def remove() -> None:
        with contextlib.suppress(OSError):
            page.unlink()

    page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    interrupt.before_exit(remove)
    files.replace(page, f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
    return page


@dataclass(frozen=True)
class Stopping:
    """Stops jobs as the command does, in a process of its own."""

    where: Where

    async def stop(self, name: str) -> str:
        words = [*installed("orchestrator"), "stop"]
        words += ["--experiments", str(self.where.experiments.absolute())]
        if self.where.ssh_config is not None:
            words += ["--ssh-config", str(self.where.ssh_config.absolute())]
        if self.where.connect_timeout is not None:
            words += ["--connect-timeout", str(self.where.connect_timeout)]
        if self.where.trust_record:
            words.append("--trust-record")
        words += ["--", name]  # whatever it begins with
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # once it was asked for, Ctrl-C here does not undo it
        )
        output, _ = await process.communicate()
        return output[-LONGEST_ANSWER_BYTES:].decode("utf-8", "replace").strip()
