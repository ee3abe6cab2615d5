"""Each test of the head has a login of its own."""

from tests.records.conftest import login

__all__ = ["login"]
