"""What a node's server leaves for rank 0 of a training, and what rank 0 answers: two small files.

They are in the run directory. The training looks once per step whether the first one is there.
"""

from __future__ import annotations

from orchestrator.protocol.message import Count, Few, Message

WISH, NEWS = "profile_wish.json", "profile_news.json"
MOST_STEPS = 20  # of one profile: a trace has megabytes per step

PATIENCE = 30.0  # seconds after which a wish is stale that nobody has repeated

ASKED = "asked"  # rank 0 has not seen it yet
TRACING = "tracing"
WRITTEN = "written"
FAILED = "failed"


class ProfileWish(Message):
    """Trace so many steps."""

    id: str
    steps: Few


class ProfileNews(Message):
    """How far it is: asked, tracing, written or failed."""

    id: str
    state: str
    first: Count = 0  # the steps that are in the trace
    last: Count = 0
    directory: str = ""  # below the outputs
    text: str = ""  # why it failed, or what is lacking
