"""The directories of torch.compile on this machine."""

import os
from pathlib import Path

import pytest

from orchestrator.node.machine import compile_caches
from orchestrator.node.machine.compile_caches import VARIABLES, cache_variables
from tests.node.running import bare_spec

TARGET = {"kind": "script", "name": "a/train it.py"}


def test_caches_lie_apart_by_program_and_users_choice_holds(home: Path) -> None:
    spec = bare_spec(target=TARGET, agent=["/venv/bin/python"])
    mine = cache_variables(spec, {})
    assert set(mine) == set(VARIABLES)
    assert all(path.startswith(f"{home}/compiled/") for path in mine.values())
    assert cache_variables(spec, {}) == mine
    other = bare_spec(target={**TARGET, "name": "b/train it.py"}, agent=["/venv/bin/python"])
    assert not set(cache_variables(other, {}).values()) & set(mine.values())
    assert set(cache_variables(spec, {"TRITON_CACHE_DIR": "/mine"})) == {"TORCHINDUCTOR_CACHE_DIR"}
    assert cache_variables(spec.replace(env=dict.fromkeys(VARIABLES, "/mine")), {}) == {}


def test_prune_removes_longest_unused_above_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_caches, "MOST_BYTES", 2500)
    for name, used in (("oldest", 1e6), ("old", 2e6), ("new", 3e6), ("running", 9e6)):
        path = Path(compile_caches.caches_root(), name)
        path.mkdir(parents=True)
        (path / "kernel.so").write_bytes(b"x" * 1000)
        os.utime(path, (used, used))
    compile_caches.prune_caches(9e6 + 60)
    left = sorted(path.name for path in Path(compile_caches.caches_root()).iterdir())
    assert left == [".pruned", "new", "running"]
    compile_caches.prune_caches(9e6 + 120)
