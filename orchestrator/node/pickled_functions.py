"""Pickles of functions that keep the file of their code, for tracebacks and for pdb.

Since 3.1.3 cloudpickle replaces the file's name, so that equal functions have equal pickles.
"""

from __future__ import annotations

import io
from types import CodeType
from typing import IO, Any


def dump(what: object, file: IO[bytes]) -> None:
    """Write a pickle that may contain functions; raise ImportError without cloudpickle."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is CodeType:
                return with_file(obj, cloudpickle.CloudPickler.dispatch_table[type(obj)](obj))
            return super().reducer_override(obj)

    Pickler(file).dump(what)


def dumps(what: object) -> bytes:
    """Return a pickle that may contain functions; raise ImportError without cloudpickle."""
    file = io.BytesIO()
    dump(what, file)
    return file.getvalue()


def with_file(code: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    make, arguments = reduced[:2]
    named = (code.co_filename if value == "<dynamic-code>" else value for value in arguments)
    return (make, tuple(named), *reduced[2:])
