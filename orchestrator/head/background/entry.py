"""The program of a background process: it reads a pickled call, and executes it.

It runs isolated, and then on the asking program's path: no module of its directory gets in first.
"""

import json
import pickle
import sys

if __name__ == "__main__":
    home, path = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = [*([] if home in sys.path else [home]), *sys.path, *path]
    from orchestrator.head.background.process import serve_function

    serve_function(*pickle.load(sys.stdin.buffer))
