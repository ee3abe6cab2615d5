"""Random faults for N minutes, and the invariants: no orphan, no lost line, no trace, no hang.

    python scripts/bench/chaos.py --minutes 10      (root: the hosts are network namespaces)

Prints how often each fault was injected, how the jobs ended, and every violation; exits with 1 if
there are any.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from chaos_faults import Chaos, as_data, told
from ground import progress, require_root

from tests.clusters.netns import NetnsCluster


def main() -> None:
    parser = argparse.ArgumentParser(description="Break everything, and look at what is left.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_root()
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="orchestrator-chaos-") as name:
        cluster = NetnsCluster(options.hosts, Path(name) / "cluster", tmpfs=[Path.home()])
        work = Path(name) / "work"
        work.mkdir()
        with cluster, Chaos(cluster, work, options.seed) as chaos:
            while time.monotonic() < until:
                progress(
                    f"seed {options.seed}, {chaos.rounds} jobs, {len(chaos.broken)} violations"
                )
                for broken in chaos.round():
                    print(f"\n{broken}", file=sys.stderr, flush=True)
    progress("")
    if options.json:
        print(json.dumps({"seed": options.seed, **as_data(chaos)}, indent=1))
    else:
        print(f"seed {options.seed}, {options.hosts} hosts, {options.minutes:g} minutes\n")
        print(told(chaos))
    sys.exit(bool(chaos.broken))


if __name__ == "__main__":
    main()
