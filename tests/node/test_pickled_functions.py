"""Functions as pickles, with every cloudpickle."""

import pickle
from collections.abc import Callable

from orchestrator.node import pickled_functions


def test_pickled_code_keeps_its_file_name() -> None:
    """Tracebacks and pdb show the line: one that names no file shows nothing."""

    def outer() -> Callable[[], int]:
        return lambda: 3

    class Inner:
        def method(self) -> int:
            return 4

    function, kind = pickle.loads(pickled_functions.dumps((outer, Inner)))
    assert function is not outer and function()() == 3 and kind().method() == 4
    for code in (function.__code__, function().__code__, kind.method.__code__):
        assert code.co_filename == __file__
