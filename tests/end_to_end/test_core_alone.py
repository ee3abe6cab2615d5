"""The core plans and launches where there is neither torch nor the engine."""

from __future__ import annotations

import pytest

from tests.launching import Head

pytestmark = pytest.mark.cluster

# Loaded by every Python of the head and of the job.
NEITHER = """
import sys
for name in ("torch", "numpy", "orchestrator.engine"):
    sys.modules[name] = None
"""


def test_the_core_plans_and_launches_without_torch_and_the_engine(head: Head) -> None:
    place = head.directory / "neither"
    place.mkdir()
    (place / "sitecustomize.py").write_text(NEITHER)
    script = head.directory / "script.py"
    script.write_text("import sys\nprint('torch is', sys.modules['torch'])\n")
    words = ["--no-torchrun", "--env", f"PYTHONPATH={place}", str(script)]
    planned = head.launch("--dry-run", *words, PYTHONPATH=str(place))
    assert planned.finish() == 0, planned.text
    launched = head.launch(*words, PYTHONPATH=str(place))
    assert launched.finish() == 0, launched.text
    assert launched.text.count("torch is None") == 2
    assert head.nothing_left()
