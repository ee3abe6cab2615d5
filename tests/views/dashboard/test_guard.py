"""Who may see the pages, and who may change something."""

from __future__ import annotations

import pytest

from orchestrator.views.dashboard.guard import Guard

GUARD = Guard(8321, frozenset({"head.example.org"}))


def test_who_is_known() -> None:
    cookie = {GUARD.cookie: GUARD.session}
    assert GUARD.knows(cookie, "") and GUARD.knows({}, f"Bearer {GUARD.token}")
    assert not GUARD.knows({}, "") and not GUARD.knows({}, "Bearer ")
    assert not GUARD.knows({GUARD.cookie: GUARD.token}, f"Basic {GUARD.token}")
    assert not GUARD.knows({"orchestrator-1": GUARD.session}, "")
    assert not GUARD.knows({GUARD.cookie: "\udcff"}, "Bearer \u00e9")
    assert GUARD.session not in (GUARD.form, GUARD.token)
    assert Guard(1).token != Guard(1).token
    # Two machines' dashboards on their usual port, both behind ssh -L to one browser.
    assert Guard(8321).cookie != Guard(8321).cookie


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, False),
        ({"x-orchestrator-form": GUARD.form}, True),
        ({"x-orchestrator-form": GUARD.session}, False),
        ({"x-orchestrator-form": GUARD.form, "sec-fetch-site": "same-origin"}, True),
        ({"x-orchestrator-form": GUARD.form, "sec-fetch-site": "cross-site"}, False),
        ({"x-orchestrator-form": GUARD.form, "sec-fetch-site": "same-site"}, False),
        ({"x-orchestrator-form": GUARD.form, "origin": "http://localhost:8321"}, True),
        ({"x-orchestrator-form": GUARD.form, "origin": "http://localhost:9999"}, False),
        ({"x-orchestrator-form": GUARD.form, "origin": "null"}, False),
        ({"authorization": f"Bearer {GUARD.token}"}, True),
        ({"authorization": f"Bearer {GUARD.token}", "origin": "https://evil.example"}, False),
    ],
)
def test_who_may_change_something(headers: dict[str, str], may: bool) -> None:
    assert GUARD.may_change({"host": "localhost:8321", **headers}) is may
