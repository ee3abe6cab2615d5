from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.config.launch import Where
from orchestrator.errors import UsageError
from orchestrator.head.commands import stop


@pytest.mark.parametrize("grace", [math.inf, 1e10, math.nan, -1.0])
def test_a_grace_that_nobody_can_wait_for_is_refused(tmp_path: Path, grace: float) -> None:
    """Before anything is asked of a node: there, a timer would overflow, or kill at once."""
    with pytest.raises(UsageError, match="--grace is"):
        stop.stop(Where(experiments=tmp_path), None, grace=grace, as_json=False)
