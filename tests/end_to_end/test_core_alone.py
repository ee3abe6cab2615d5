"""The core plans and launches where there is neither torch nor the engine."""

from tests.launching import Head

# Loaded by every Python of the head and of the job.
NEITHER = """
import sys
for name in ("torch", "numpy", "orchestrator.engine"):
    sys.modules[name] = None
"""


def test_core_launches_without_torch_and_engine(head: Head) -> None:
    place = head.directory / "neither"
    place.mkdir()
    (place / "sitecustomize.py").write_text(NEITHER)
    script = head.directory / "script.py"
    script.write_text("import sys\nprint('torch is', sys.modules['torch'])\n")
    words = ["--no-torchrun", "--env", f"PYTHONPATH={place}", str(script)]
    head.run("--dry-run", *words, PYTHONPATH=str(place))
    launched = head.run(*words, PYTHONPATH=str(place))
    assert launched.text.count("torch is None") == 2
    assert head.nothing_left()
