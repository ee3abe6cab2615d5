"""`python -m orchestrator.engine.overlap` still runs engine.observe.overlap."""

import sys

from orchestrator.engine.observe.overlap import main

if __name__ == "__main__":
    sys.exit(main())
