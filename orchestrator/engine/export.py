"""`python -m orchestrator.engine.export` still runs engine.saving.export."""

import sys

from orchestrator.engine.saving.export import main

if __name__ == "__main__":
    sys.exit(main())
