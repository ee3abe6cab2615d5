"""Defines two small files: a node's server asks rank 0 for a profile, and rank 0 answers.

Both lie in the run directory. The training looks for the request once per step.
"""

from __future__ import annotations

from orchestrator.protocol.message import Count, Few, Message

WISH, NEWS = "profile_wish.json", "profile_news.json"
MOST_STEPS = 20  # of one profile: a trace has megabytes per step

PATIENCE_SECONDS = 30.0  # after which a wish is stale that nobody has repeated

ASKED = "asked"  # rank 0 has not seen it yet
TRACING = "tracing"
WRITTEN = "written"
FAILED = "failed"


class ProfileWish(Message):
    """Trace so many steps."""

    id: str
    steps: Few


class ProfileNews(Message):
    """Say how far the profile is: asked, tracing, written or failed."""

    id: str
    state: str
    first: Count = 0  # the steps that are in the trace
    last: Count = 0
    directory: str = ""  # below the outputs
    text: str = ""  # why it failed, or what is lacking
