"""`python -m orchestrator.engine.overlap` reads the traces of all ranks, without the head."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.traces.overlap import as_data, compare, to_text
from orchestrator.traces.rank import Rank, read


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.engine.overlap",
        description="Read the traces of all ranks.",
    )
    parser.add_argument("trace", type=Path, nargs="+", help="one per rank: .json or .json.gz")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    ranks: dict[int, Rank] = {}
    try:
        for index, path in enumerate(options.trace):
            number, rank = read(path)
            named = re.search(r"rank_?(\d+)", path.name)
            number = number if number is not None else int(named[1]) if named else index
            if number in ranks:
                raise UsageError(f"{path} is a second trace of rank {number}")
            ranks[number] = rank
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    overlap = compare(ranks)
    sys.stdout.write((json.dumps(as_data(overlap)) if options.json else to_text(overlap)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
