"""The types of events, and the listener that hears them."""

import logging
import string

import pytest

from orchestrator.head.events import of_job, of_launch
from orchestrator.head.events.of_job import NodeIsBack, NodeLost
from orchestrator.head.screen.events import Alarm, HeadEvent, event_listener, tell

TYPES = [
    kind
    for module in (of_launch, of_job)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, HeadEvent) and kind not in (HeadEvent, Alarm)
]


@pytest.mark.parametrize("kind", TYPES)
def test_sentence_names_every_field(kind: type[HeadEvent]) -> None:
    named = {name for _, name, _, _ in string.Formatter().parse(kind.sentence) if name}
    assert named == set(kind._defaults) or kind.words is not HeadEvent.words


def test_listener_logs_draws_and_notifies(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "orchestrator")
    drawn: list[str] = []
    told: list[HeadEvent] = []
    back, lost = NodeIsBack("node 1 (b)", 2.4), NodeLost("node 1 (b)", "a reset {by} it")
    with event_listener(draw=lambda event: drawn.append(event.words()), notify=told.append):
        tell(lost)
        tell(back)
    tell(back)
    assert drawn == ["node 1 (b): a reset {by} it; reconnecting", "node 1 (b) is back after 2 s"]
    assert told == [lost, back]
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", f"NodeLost: {drawn[0]}"),
        *[("INFO", f"NodeIsBack: {drawn[1]}")] * 2,
    ]
