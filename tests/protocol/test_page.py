"""docs/protocol.md lists every message there is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = "import protocol_page as p; raise SystemExit(p.PAGE.read_text() != p.page())"


def test_protocol_page_is_up_to_date() -> None:
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(
        command, cwd=ROOT / "scripts", check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, "type ./scripts/protocol_page.py"
