"""Functions that are sent to ranks, with the modules of the calling program that they need."""

from __future__ import annotations

import os
import pickle
import site
import sys
import sysconfig
import zipfile
from pathlib import Path

from orchestrator.common.errors import UsageError
from orchestrator.node import pickled_functions


def places(directory: Path) -> list[str]:
    """List where this program finds modules of its own; relative, what the directory holds."""
    found, installed = [], installed_places()
    for place in map(Path, dict.fromkeys(map(os.path.abspath, sys.path))):
        if place.exists() and not f"{place}/".startswith(installed):
            below = place.is_relative_to(directory)
            found.append(str(place.relative_to(directory) if below else place))
    return found


def installed_places() -> tuple[str, ...]:
    """List the directories of Python, and of what is installed for it."""
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages = [*standard, *site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{place}/" for place in packages)


# -- calls --------------------------------------------------------------------------------------


def check_callable(function: object) -> None:
    """Refuse what no rank could call, before any of them is started."""
    if not callable(function):
        raise UsageError(
            f"{function!r:.80} is not a function, it is of type {type(function).__name__}",
            "name a function without calling it: run(work, 10), not run(work(10)); "
            "cluster.launch('train.py') starts a script",
        )


def pack(payload: Path, name: str, call: tuple[object, ...], directory: Path) -> None:
    """Write the call, and the cloudpickle that can read it: nodes need not have one."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        with (payload / "call.pkl").open("wb") as file:
            pickle.dump(places(directory), file)
            pickled_functions.dump(call, file)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be sent to the nodes: {error}",
            "files, locks and connections stay here: open them inside the function",
        ) from error
    home = Path(cloudpickle.__file__).parent
    with zipfile.ZipFile(payload / "cloudpickle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in home.glob("*.py"):
            archive.write(path, f"cloudpickle/{path.name}")
