"""The earlier name of orchestrator.engine.saving.export, for `python -m orchestrator.engine.export`."""

import sys

from orchestrator.engine.saving.export import main

if __name__ == "__main__":
    sys.exit(main())
