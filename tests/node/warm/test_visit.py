"""When the standby for what follows a job is started, while the job runs."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.node.server.session import ServerSession
from orchestrator.node.warm import standbys
from orchestrator.node.warm.session import (
    AFTER_SECONDS,
    AGAIN_SECONDS,
    SILENT_SECONDS,
    StandbySession,
)
from orchestrator.protocol.events import Event, FirstOutput, RankStarted
from orchestrator.protocol.spec import Spec
from tests.node.running import Job, bare_spec

pytestmark = pytest.mark.slow

STARTED = RankStarted(time=1000.0, rank=0, local=0, pid=1, keeper=2)


def following(job: Job, spec: Spec) -> StandbySession:
    job.run.write_spec(spec)
    session = ServerSession().of(StandbySession)
    session.follow(job.run)
    return session


@pytest.mark.parametrize(
    ("event", "seconds"),
    [(FirstOutput(time=1000.0), AFTER_SECONDS), (STARTED, SILENT_SECONDS + AFTER_SECONDS)],
)
def test_standby_starts_once_ranks_began(
    event: Event, seconds: float, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, begun = new_job(), list[Any]()
    job.run.create()
    monkeypatch.setattr(standbys, "start_standby", lambda *words: begun.append(words))
    ahead = following(job, bare_spec(warm=600.0))
    ahead.check(100.0)
    ahead.check(100.0 + 10 * SILENT_SECONDS)
    # No rank has started.
    assert not begun
    job.run.append_event(event)
    now = 1000.0
    while not begun:
        assert now <= 1000.0 + seconds
        ahead.check(now)
        now += 0.5
    assert now >= 1000.0 + seconds


@pytest.mark.parametrize(("restarts", "looks"), [(0, 1), (1, 3)])
def test_ended_standby_returns_for_restart_alone(
    restarts: int, looks: int, new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, begun = new_job(), list[Any]()
    job.run.create()
    job.run.append_event(FirstOutput(time=0.0))
    monkeypatch.setattr(standbys, "start_standby", lambda *words: begun.append(words))
    spec = bare_spec(warm=600.0, restarts=restarts)
    ahead = following(job, spec)
    for now in (0.0, *(AFTER_SECONDS + look * AGAIN_SECONDS for look in range(3))):
        ahead.check(now)
    assert len(begun) == looks
