from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def login(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of this login, where its key is: another one for each test."""
    home = tmp_path_factory.mktemp("login")
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(home))
    return home
