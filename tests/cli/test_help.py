"""The topics of docs/troubleshooting.md: each message that it explains exists, and leads to it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.help import OPEN, read_topics, topic_of
from orchestrator.cli.main import cli

ROOT = Path(__file__).parents[2]
# Torch, Python or a shell prints these messages.
ELSEWHERE = {
    "No module named",
    "ModuleNotFoundError",
    "FileNotFoundError",
    "CheckpointException",
    "Can't find a valid checkpoint at",
    # The message has the request's name in place of the example.
    "it does not answer (start.start) within ...",
}


@pytest.fixture(scope="module")
def said() -> str:
    """All texts of the package, with strings that go over several lines as one."""
    found = [path.read_text(encoding="utf-8") for path in (ROOT / "orchestrator").rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(found))


def test_documented_messages_exist_in_code(said: str) -> None:
    missing = []
    for topic in read_topics().values():
        for words in topic.messages:
            pieces = [piece.strip() for piece in OPEN.split(words)]
            if words not in ELSEWHERE and max(pieces, key=len) not in said:
                missing.append(f"{topic.name}: {words}")
    assert missing == []
    assert sum(len(topic.messages) for topic in read_topics().values()) > 35


@pytest.mark.parametrize(
    ("message", "topic"),
    [
        ("1 of 2 nodes cannot be used\n  gpu2  its host key has changed: ...", "host-key-changed"),
        ("it hung up on ada after 3 of 11 keys", "too-many-keys"),
        ("script not found: trian.py (4 of 4 nodes: a, b)", "script-not-found"),
        ("it denies ada every key\n  there is no torch on gpu1", "every-key-denied"),
        ("there is no torch on gpu1\n  it denies ada every key", "no-torch"),
        ("launch.sync is 'x'; it can be auto, always, off", ""),
    ],
)
def test_message_leads_to_topic(message: str, topic: str) -> None:
    assert topic_of(message) == topic


def test_every_topic_is_shown() -> None:
    run = CliRunner().invoke
    listed = run(cli, ["help"], standalone_mode=False)
    for name, topic in read_topics().items():
        assert f"  {name}\n" in listed.output
        shown = run(cli, ["help", name], standalone_mode=False)
        assert shown.output.startswith(f"{topic.title}\n\n") and "](" not in shown.output
    assert "Usage: orchestrator prune" in run(cli, ["help", "prune"], standalone_mode=False).output


def test_unknown_topic_suggests_nearest() -> None:
    command = [sys.executable, "-m", "orchestrator", "help", "host-keys-changed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no topic 'host-keys-changed'; did you mean 'host-key-changed'?" in done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["conda"], "guide/environments"),
        (["how", "do", "I", "use", "conda?"], "guide/environments"),
        (["NCCL_SOCKET_IFNAME"], "guide/network"),
        (["resume"], "guide/keeping"),
        (["hang"], "--hang-timeout"),
    ],
)
def test_help_finds_words_in_topics_guide_and_options(words: list[str], found: str) -> None:
    shown = CliRunner().invoke(cli, ["help", *words], standalone_mode=False).output
    assert found in shown and "host-key-changed" not in shown
