"""How the nodes of a job are reached after its launch."""

from dataclasses import replace

import pytest

from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.schedulers.backend import backend_of
from tests.head.start.test_gather import record


@pytest.mark.parametrize(("waits", "later"), [(60.0, 60.0), (3.0, 10.0)])
def test_backend_keeps_connect_timeout_of_launch(waits: float, later: float) -> None:
    job = record("ab")
    job = replace(job, launch=replace(job.launch, connect_timeout=waits))
    transport = backend_of(job).transport(job, None)
    assert isinstance(transport, SshTransport)
    assert transport.timeout == later
    # A typed timeout is used as it is.
    transport = backend_of(job).transport(job, None, 5.0)
    assert isinstance(transport, SshTransport)
    assert transport.timeout == 5.0
