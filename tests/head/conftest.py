"""Each test of the head has a login of its own."""

from collections.abc import Iterator

import pytest

from tests.head.heard import hearing
from tests.records.conftest import login

__all__ = ["login"]


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages for the user, without colours."""
    with hearing() as messages:
        yield messages
