"""Contents and location of the package's logs, and the text that is left out of them."""

import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common import hiding, logs
from orchestrator.head.screen import output
from orchestrator.head.screen.events import event_listener, say
from orchestrator.records.experiment import Attempt, Experiment
from orchestrator.records.outcome import JobVerdict
from tests.records.test_experiment import NODE, record

LOG = logging.getLogger("orchestrator.head.connect.channel")
SECRET = "s3cret-value-0815"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loggers = (logs.PACKAGE, logs.PARAMIKO)
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    monkeypatch.setattr(logs, "_environment", ())
    monkeypatch.setattr(hiding, "held", [])
    for logger in loggers:
        logger.handlers[:] = []
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_terminal_shows_chosen_level(level: int) -> None:
    shown: list[str] = []
    logs.show_log_on_terminal(level, shown.append)
    # A launch keeps all of the log in a file.
    logs.hold_lines()
    LOG.debug("%s: is asked %s", "n1", "machine.probe")
    LOG.info("checks %d nodes", 2)
    transport = logging.getLogger("paramiko.transport")
    transport.info("Connected")
    transport.warning("Oops")
    debug = level == logging.DEBUG
    assert [line.partition(" ")[2] for line in shown] == [
        *["DEBUG   connect.channel: n1: is asked machine.probe"] * debug,
        "INFO    connect.channel: checks 2 nodes",
        *["INFO    paramiko.transport: Connected"] * debug,
        "WARNING paramiko.transport: Oops",
    ]


def test_user_message_is_logged_in_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.show_log_on_terminal(logging.DEBUG, output.complain)
    logs.write_log_to(tmp_path / "head.log")
    say("sends the code")
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("sends the code") == 1
    assert "screen.events: Note: sends the code\n" in (tmp_path / "head.log").read_text()


def test_log_contains_lines_from_before_its_directory(tmp_path: Path) -> None:
    """Also in the file of the next try, where the first one's directory is discarded again."""
    logs.hold_lines()
    LOG.debug("connecting")
    for name in ("first", "second"):
        logs.write_log_to(tmp_path / f"{name}.log")
        LOG.debug("in the %s", name)
        logs.write_log_to(tmp_path / f"{name}.log")
    logs.stop_holding_lines()
    LOG.debug("started")
    first, second = ((tmp_path / f"{name}.log").read_text() for name in ("first", "second"))
    assert [line.rpartition(": ")[2] for line in first.splitlines()] == [
        "connecting",
        "in the first",
    ]
    assert [line.rpartition(": ")[2] for line in second.splitlines()] == [
        *("connecting", "in the first", "in the second", "started")
    ]


def test_secrets_are_hidden_wherever_head_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    hiding.held.append(SECRET)
    logs.hold_lines()
    logs.show_log_on_terminal(logging.DEBUG, shown.append)
    logs.write_log_to(tmp_path / "head.log")
    LOG.info("the hook said %s", f"key {SECRET}")
    LOG.info("at https://anna:pass@host/x with hf_%s", "a" * 30)
    logs.append_line(tmp_path / "head.log", LOG.name, "a note of %s", SECRET)
    with event_listener(draw=lambda told: shown.append(told.styled_words())):
        say(f"heard {SECRET}")
    say(f"said {SECRET}")
    output.complain(f"n1: cannot read {SECRET}")
    output.print_result([], lambda _: f"result {SECRET}")
    # A name stays, as later heads reach the node by it.
    node = replace(NODE, name=SECRET)
    cause = JobVerdict(node_name="n1", message=f"n1: cannot read {SECRET}")
    ended = Attempt(1, 0.0, 1.0, "failed", 4, cause, [], why=cause.message)
    made = record(command=["x", SECRET], verdict=cause, nodes=[node], attempts=[ended])
    Experiment(tmp_path).write_record(made)
    written = Experiment(tmp_path).read_record()
    assert [each.name for each in written.nodes] == [SECRET]
    assert (tmp_path / "job.json").read_text().count(SECRET) == 1
    Experiment(tmp_path).write_json("manifest.json", {"hook": SECRET})
    Experiment(tmp_path).write_yaml("config.yaml", {"env": {"A": f"'{SECRET}"}})
    assert not [path for path in tmp_path.glob("[cm]*") if SECRET in path.read_text()]
    text = (tmp_path / "head.log").read_text() + "\n".join(shown) + "".join(capsys.readouterr())
    assert text.count("(redacted)") == 2 * 3 + 1 + 6
    assert not [word for word in (SECRET, "anna:pass", "hf_aaa") if word in text]


def test_log_file_is_private_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    umask = os.umask(0)
    try:
        handler = logs.HeadLog(tmp_path / "head.log", largest=1000)
        for number in range(50):
            handler.handle(
                LOG.makeRecord(LOG.name, logging.INFO, "", 0, "line %d", (number,), None)
            )
        handler.close()
    finally:
        os.umask(umask)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["head.log", "head.log.1"]
    assert all(path.stat().st_size < 1100 for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert files[0].read_text().endswith("line 49\n")


def test_unwritable_log_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "head.log").symlink_to("/dev/full")
    logs.write_log_to(tmp_path / "head.log")
    LOG.info("a line")
    logs.append_line(tmp_path / "head.log", LOG.name, "a note")
    logs.append_line(tmp_path / "gone" / "head.log", LOG.name, "a note")
    assert capsys.readouterr() == ("", "")
