"""The earlier name of orchestrator.engine.observe.overlap, for `python -m orchestrator.engine.overlap`."""

import sys

from orchestrator.engine.observe.overlap import main

if __name__ == "__main__":
    sys.exit(main())
