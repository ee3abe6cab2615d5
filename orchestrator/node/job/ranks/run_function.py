"""The program of every rank of Cluster.run: it calls the function that came with the job.

The function's result, or its exception, is written to the outputs and fetched. This file
imports nothing of this package, like rank.py: it shares a process with the user's code.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any


def main() -> None:
    payload = os.path.join(os.path.dirname(os.environ["ORCHESTRATOR_RUN"]), "payload")
    # The package's own directory moves to the end of the path.
    sys.path.append(sys.path[0])
    sys.path[0] = os.path.join(payload, "cloudpickle.zip")
    # The payload brought the cloudpickle of the head.
    import cloudpickle

    try:
        with open(os.path.join(payload, "call.pkl"), "rb") as file:
            # The caller's module directories come first; the current directory follows, as with -m.
            places = map(os.path.abspath, [*pickle.load(file), "."])
            sys.path[:1] = filter(os.path.exists, dict.fromkeys(places))
            function, args, kwargs = pickle.load(file)
        write_result(cloudpickle, function(*args, **kwargs))
    except Exception as error:
        write_error(cloudpickle, error)
        raise


def write_result(cloudpickle: Any, result: Any) -> None:
    try:
        write("pkl", lambda file: cloudpickle.dump(result, file))
    except OSError:
        raise
    # Pickling an object of the user's may raise anything.
    except Exception as error:  # noqa: BLE001
        raise unsendable(result, error) from None


def unsendable(result: Any, error: Exception) -> TypeError:
    """Return the error for a result that cannot be pickled."""
    kind = type(result).__name__
    return TypeError(
        f"its result cannot be sent back: {text_of(error)} (a {kind}; return numbers, strings,"
        " tensors, or lists and dicts of them)"
    )


def write_error(cloudpickle: Any, error: Exception) -> None:
    """Send the exception back if a pickle reproduces its type; else its text is printed."""
    try:
        data = cloudpickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            write("error", lambda file: file.write(data))
    # The user's own exception matters more than one of its pickling.
    except Exception as worse:  # noqa: BLE001
        sys.stderr.write(
            f"orchestrator: this {type(error).__name__} cannot be sent back: {text_of(worse)}\n"
        )


def text_of(error: BaseException) -> str:
    """Return an exception's text. Its class is the user's own, so str() itself may fail."""
    return str(traceback.TracebackException(type(error), error, None))


def write(kind: str, fill: Any) -> None:
    """Write a whole file or none."""
    directory = os.path.join(os.environ["ORCHESTRATOR_EXPERIMENT"], "outputs", "results")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    name = f"rank_{os.environ['RANK']}.{kind}"
    new = os.path.join(directory, f".{name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        fill(file)
    os.replace(new, os.path.join(directory, name))


if __name__ == "__main__":
    main()
