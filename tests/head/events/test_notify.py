"""The commands of --notify: what is refused, shown and kept of them, and what they are told."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Launch, LaunchArguments
from orchestrator.head.events import notify
from orchestrator.head.events.notify import Notifier, notifier_of, run_command
from orchestrator.head.follow.conclusion import end_of_attempt
from orchestrator.head.start import record as recording
from orchestrator.head.start.request import resolve_request
from orchestrator.records.experiment import NOTIFY, Attempt, Experiment, JobRecord, NodeRecord
from orchestrator.records.outcome import JobVerdict
from tests.node.running import alive, wait_until

URL = "https://hooks.example.org/services/T0/B0/hidden-part?token=1"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("./tell.sh", "./tell.sh"),
        (" curl -d@- x", "curl (redacted)"),
        ("KEY=1 curl", "(redacted)"),
        ("slack:x", "(redacted)"),
    ],
)
def test_shown_command_hides_arguments(written: str, shown: str) -> None:
    (checked,) = notify.check_commands([written, written])
    assert notify.shown_command(checked) == shown


@pytest.mark.parametrize(
    ("written", "problem", "fix"),
    [
        (" ", "there is no command", "write a shell command"),
        ("cmd:date", "takes a shell command", "cmd:X is X"),
        ("mail:me@example.org", "takes a shell command", "one with mail"),
        (" https://example.org/hook", "takes a shell command", "one line with curl"),
        ("a\0b", "there is no command", "write a shell command"),
    ],
)
def test_checked_refuses_invalid_command(written: str, problem: str, fix: str) -> None:
    with pytest.raises(UsageError) as refusal:
        notify.check_commands([written])
    assert problem in refusal.value.what and fix in refusal.value.fix
    assert "hidden" not in str(refusal.value)


def test_launch_records_hide_secrets_of_notify() -> None:
    words = (f"curl -d @- '{URL}'", "./tell.sh")
    typed = ["master_launch", "--notify", words[0], f"--notify={words[1]}", "x"]
    request = resolve_request(LaunchArguments(program=("x",), launch={"notify": words}), typed)
    assert request.notify == words
    shown = json.dumps([request.config.launch.notify, *recording.shown_command(request, typed)])
    assert "hidden-part" not in shown and "curl (redacted)" in shown and "./tell.sh" in shown
    assert "hidden-part" in json.dumps(request.secrets)  # hidden wherever else they would stand


def test_notify_file_is_private(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    assert notify.kept_commands(experiment) == ()
    experiment.write(NOTIFY, json.dumps((f"curl '{URL}'", "a b")))
    file = tmp_path / ".notify"
    assert file.stat().st_mode & 0o777 == 0o600
    assert notify.kept_commands(experiment) == (f"curl '{URL}'", "a b")
    file.chmod(0o620)
    with pytest.raises(UsageError, match="written by another login"):
        notify.kept_commands(experiment)


@pytest.mark.parametrize("text", ["{", "[[1]]", "[" * 100_000, "3", "\xff"])
def test_damaged_notify_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / ".notify").write_bytes(text.encode("latin-1"))
    (tmp_path / ".notify").chmod(0o600)
    with pytest.raises(UsageError, match="damaged"):
        notify.kept_commands(Experiment(tmp_path))


CAUSE = JobVerdict(
    **{"node": 1, "node_name": "b", "rank": 3, "time": 1.0, "kind": "exception"},
    **{"message": "ValueError: <!channel> @everyone \x1b[2J\u202e", "traceback": "t" * 20_000},
    **{"where": "train.py:7 in step", "title": "an exception", "fix": "look there"},
    others=2,
)


EXPERIMENT = Experiment(Path("/e/run_1"))
EVENT = {"event": "end", "experiment": "run_1"}


def record(state: str = "failed", **more: Any) -> JobRecord:
    node = NodeRecord(0, "a", "a", None, None, "10.0.0.1", "python3", 0, 2)
    fields = {
        **{"job": "j", "experiment": "/e/run_1", "state": state, "command": [], "nodes": [node]},
        **{"started": 100.0, "ended": 160.0, "verdict": CAUSE},
        **{"launch": Launch(notify=("x",), max_restarts=3)},
    }
    return JobRecord(**{**fields, **more})  # type: ignore[arg-type]


def test_failure_event_has_verdict(tmp_path: Path, said: list[str]) -> None:
    notifier = Notifier([f"cat > {tmp_path}/told"])
    notifier.hear(end_of_attempt(EXPERIMENT, record()))
    notifier.close()
    assert not said
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["state"], told["experiment"]) == ("failure", "failed", "run_1")
    lines = told["text"].splitlines()
    assert lines[0] == "run_1 failed after 1 min 00 s on 1 node"
    assert "rank 3 on node 1 (b)" in lines[1] and lines[-1] == "what to do: look there"
    assert not set("\x1b\u202e") & set(told["text"])
    assert told["verdict"]["rank"] == 3 and len(told["verdict"]["traceback"]) == 8000


def test_failing_command_is_reported_once_without_arguments(said: list[str]) -> None:
    notifier = Notifier(["sh -c 'exit 3' hidden"])
    for _ in range(3):
        notifier.hear(end_of_attempt(EXPERIMENT, record()))
    notifier.close()
    assert said == ["--notify sh (redacted): exit code 3; this is said once"]


def test_slow_command_delays_neither_head_nor_others(tmp_path: Path, said: list[str]) -> None:
    slow = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    notifier = Notifier([slow, f"echo >> {tmp_path}/told"])
    for _ in range(3):
        notifier.hear(end_of_attempt(EXPERIMENT, record()))
    began = time.monotonic()
    notifier.close(0.5)
    assert time.monotonic() - began < 5
    assert said == ["--notify: not all commands ended within 0.5 s"]
    # The reports go out in order, so the second one still waits for the slow command.
    assert (tmp_path / "told").read_text() == "\n"
    (tmp_path / "go").touch()


def test_command_receives_event_as_json_and_environment(tmp_path: Path, said: list[str]) -> None:
    command = f'cat > "{tmp_path}/$NOTIFY_EVENT"; env > {tmp_path}/env; echo done'
    notifier = Notifier([command])
    attempt = Attempt(1, 100.0, 130.0, "failed", 1, CAUSE, ["a", "b"], step=7, restarted=True)
    again = record("restarting", attempts=[attempt], ended=None, verdict=None)
    for each in (again, record("done", verdict=None)):
        notifier.hear(end_of_attempt(EXPERIMENT, each))
    notifier.close()
    assert not said
    restart, end = (json.loads((tmp_path / name).read_text()) for name in ("restart", "end"))
    first = "run_1 is started again: attempt 1 of at most 4 failed after 30 s at step 7"
    assert restart["text"].startswith(first) and "train.py:7" in restart["text"]
    assert end["text"] == "run_1 is done after 1 min 00 s on 1 node: /e/run_1"
    assert end["verdict"] is None
    environment = (tmp_path / "env").read_text()
    assert "NOTIFY_EXPERIMENT=run_1\n" in environment
    assert restart["path"] == end["path"] == "/e/run_1"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo first >&2; echo no room >&2; exit 3", "exit code 3: no room"),
        ("exec < /dev/null; yes | head -c 100000000 >&2; exit 4", "exit code 4: y"),
        ("no-such-program-at-all", "exit code 127"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_run_command_returns_problem(command: str, problem: str) -> None:
    assert problem in run_command(command, EVENT, 20)


def test_run_command_kills_overdue_command_with_children(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/child; sleep 600"
    problem = run_command(command, EVENT, 1)
    assert problem == "it was not done within 1 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), "its end")


def test_notifier_of_picks_head_of_first_node(tmp_path: Path, said: list[str]) -> None:
    """Only the head of the first node's part notifies, unless other users may write the file."""
    experiment, some = Experiment(tmp_path), record()
    experiment.write(NOTIFY, json.dumps(["x"]))
    assert len(notifier_of(experiment, some).commands) == 1
    second = record(nodes=[NodeRecord(1, "b", "b", None, None, "b", "python3", 2, 2)])
    assert not notifier_of(experiment, second).commands
    assert not notifier_of(experiment, record(launch=Launch())).commands
    (tmp_path / ".notify").chmod(0o606)
    assert not said and not notifier_of(experiment, some).commands
    assert "no command is notified" in said[0]
