"""The pages: what is in the page of an experiment, with the report's own readers and HTML, and the
HTML around what the scripts fill in.

Every value is escaped; no page has a script of its own, as its policy allows only the files of this
server.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import quote

from orchestrator.records.experiment import Experiment
from orchestrator.views.dashboard.listing import fingerprint
from orchestrator.views.report import page, story

SCRIPTS = ("uplot.js", "page.js", "board.js")
STYLES = ("uplot.css", "page.css", "board.css")
NAV = '<nav><a href="/">All experiments</a> <span id="alive" role="status">reading ...</span>'
EMPTY = '<script type="application/json" id="data">{"charts":[],"maps":[]}</script>'

Compared = Callable[[Sequence[Experiment]], Mapping[str, Mapping[str, Sequence[Any]]]]


@dataclass
class Page:
    """One experiment, or several side by side; it is read again only when a file has changed."""

    experiments: Sequence[Experiment]
    compared: Compared
    seen: list[Any] = field(default_factory=list)

    def look(self) -> bytes | None:
        """Return the parts of the page as JSON, packed; None: they are what they were."""
        now = [fingerprint(each) for each in self.experiments]
        if now == self.seen:
            return None
        text = json.dumps(self.parts(), separators=(",", ":"), allow_nan=False)
        self.seen = now
        return gzip.compress(text.encode(), 3, mtime=0)

    def parts(self) -> dict[str, Any]:
        several = len(self.experiments) > 1
        others = len(self.experiments) - 1
        told = [story.tell(each, others, logs=False) for each in self.experiments]
        drawn, data = page.pictures(told)
        differences = self.compared(self.experiments) if several else {}
        details = [
            *page.compared(told, differences),
            *(part for each in told for part in page.details(each, several=several)),
        ]
        return {
            "over": all(each.record.over for each in told),
            "heading": "".join(part for each in told for part in page.heading(each)),
            "drawn": drawn,
            "details": "".join(details),
            "data": data,
        }


# -- the HTML around it -----------------------------------------------------------------------


def whole(title: str, kind: str, body: str, *, form: str, names: Sequence[str] = ()) -> str:
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="/static/{name}" defer></script>' for name in SCRIPTS)
    chosen = "".join(f'<meta name="experiment" content="{escape(name)}">' for name in names)
    return f"""<!doctype html>
<html lang="en" data-kind="{kind}">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="form" content="{escape(form)}">{chosen}
<title>{escape(title)}</title>
{styles}{scripts}
<body>
<a class="skip" href="#main">to the content</a>
<main id="main">
{body}
</main>
{EMPTY}
</body>
</html>
"""


def home(root: str, form: str) -> str:
    body = f"""<header><h1>Experiments</h1>
<p class="soft">{escape(root)} <span id="alive" role="status">reading ...</span></p></header>
<form id="choose"><label>Find <input id="filter" type="search" autocomplete="off"></label>
<button id="compare" type="submit" disabled>Compare</button>
<span class="soft">choose 2 to 8</span></form>
<div class="scroll"><table id="list"><thead><tr><th><span class="hidden">choose</span></th>
<th>experiment</th><th>state</th><th class="number">step</th><th class="number">loss</th>
<th class="number">speed</th><th class="number">left</th><th class="number">training</th>
<th class="number">nodes x ranks</th><th>slowest</th><th>started</th></tr></thead>
<tbody></tbody></table></div>
<p id="nothing" hidden>There is no experiment here yet: master_launch SCRIPT starts one.</p>"""
    return whole("Experiments", "list", body, form=form)


def experiment(name: str, nodes: Sequence[tuple[int, str]], form: str) -> str:
    options = "".join(
        f'<option value="{index}">node {index} ({escape(label)})</option>' for index, label in nodes
    )
    body = f"""{NAV}
<button id="stop" type="button" hidden>Stop this job</button></nav>
<p id="stopping" role="status" hidden></p>
<div id="heading"><h1>{escape(name)}</h1></div>
<div id="drawn"><p class="soft">The metrics are being read ...</p></div>
<section><h2>Logs</h2>
<form id="search"><label>Log of <select id="node">{options}</select></label>
<label>Find in all logs <input id="word" type="search" maxlength="200" autocomplete="off"></label>
<button type="submit">Find</button></form>
<p id="found" class="soft" role="status"></p><ol id="hits" hidden></ol>
<pre id="log" tabindex="0" aria-label="log"></pre></section>
<div id="details"></div>
<dialog id="ask"><form method="dialog"><p>Stop {escape(name)} on all its nodes?</p>
<p class="soft">The ranks are asked to save and end; what is left after their grace is killed.</p>
<button value="stop">Stop it</button> <button value="" autofocus>Leave it running</button>
</form></dialog>"""
    return whole(name, "experiment", body, form=form, names=[name])


def compare(names: Sequence[str], form: str) -> str:
    listed = ", ".join(map(escape, names))
    body = f"""{NAV}
</nav><h1 class="hidden">{listed}</h1><div id="heading"></div>
<div id="drawn"><p class="soft">The metrics are being read ...</p></div><div id="details"></div>"""
    return whole("Compare", "compare", body, form=form, names=names)


def entered(path: str) -> str:
    """Return what follows the token: a page of ours asks for the one that was meant."""
    own = escape("/" + quote(path.lstrip("/\\")))  # never another server's
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url={own}">'
        f'<title>Experiments</title><p><a href="{own}">Experiments</a>'
    )


def refused() -> str:
    return (
        '<!doctype html><meta charset="utf-8"><title>Not shown</title><p>Open the address that'
        " <code>orchestrator dashboard</code> printed: it has a token."
    )
