from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.head.screen import output
from orchestrator.head.screen.lines import clean


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages for the user, without colours."""
    messages: list[str] = []
    with output.heard_by(lambda text: messages.append(clean(text))):
        yield messages
