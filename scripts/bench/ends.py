"""Random ends of one node's part of a job: what it leaves, times how it ends; is each proof true?

    python scripts/bench/ends.py --rounds 500 [--seed 1] [--workers 2] [--kind storm] [--way stop]

Prints one line for each round and a summary; exits with 1 if any receipt said that nothing is left
while something lived. Needs root: every worker has a PID namespace of its own.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ground import require_root

from tests.node.job import leftovers
from tests.node.job.ends import WAYS, Round, random_end


def main() -> None:
    parser = argparse.ArgumentParser(description="End jobs in all ways; is every proof true?")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kind", choices=leftovers.KINDS)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    require_root()
    print(f"seed {options.seed}", flush=True)
    with ThreadPoolExecutor(options.workers) as pool:
        shares = list(pool.map(partial(share_of, options.seed), range(options.workers)))
    sys.exit(summary([line for lines in shares for line in lines]))


def share_of(seed: int, worker: int) -> list[dict[str, str]]:
    """Have a worker play its rounds in a PID namespace of its own, whose first process reaps."""
    words = [sys.executable, *sys.argv, "--seed", str(seed), "--worker", str(worker)]
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    reaps = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]
    lines = []
    with subprocess.Popen([*apart, *reaps, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.append(json.loads(line))
            else:
                print(line, end="", flush=True)
    return lines


def work(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="orchestrator-ends-") as name:
        os.environ["ORCHESTRATOR_HOME"] = name
        for number in range(options.worker, options.rounds, options.workers):
            seed = options.seed * 1_000_000 + number
            try:
                played = random_end(Path(name), seed, options.kind, options.way)
            except Exception as error:  # noqa: BLE001  the other rounds go on
                print(f"{seed} BROKEN: {error!r}", flush=True)
                print(json.dumps({"kind": "?", "way": "?", "said": "broken"}), flush=True)
                continue
            print(played.in_words, flush=True)
            print(json.dumps(counted(played)), flush=True)


def counted(played: Round) -> dict[str, str]:
    said = "proved" if played.proved else "named" if played.alive else "doubted without need"
    return {
        "kind": played.kind,
        "way": played.way,
        "said": "FALSE" if played.is_false else said,
    }


def summary(lines: list[dict[str, str]]) -> bool:
    """Print what was said how often; return whether anything of that was false."""
    said = collections.Counter(line["said"] for line in lines)
    print(f"\n{len(lines)} rounds: " + ", ".join(f"{n} {word}" for word, n in said.most_common()))
    for by in ("kind", "way"):
        false = collections.Counter(line[by] for line in lines if line["said"] == "FALSE")
        named = collections.Counter(line[by] for line in lines if line["said"] == "named")
        print(f"false by {by}: {dict(false)}; named by {by}: {dict(named)}")
    return bool(said["FALSE"] or said["broken"])


if __name__ == "__main__":
    main()
