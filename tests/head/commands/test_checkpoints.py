"""`orchestrator checkpoint`, typed as a user types it."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.config.launch import Where
from orchestrator.head.commands import checkpoints
from orchestrator.head.screen import output
from orchestrator.records import checkpoint_store
from tests.records.test_checkpoint_store import change, experiment, save
from tests.typed import typed as typed_in

ORCHESTRATOR = str(Path(sys.executable).parent / "orchestrator")
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    experiment(tmp_path / "experiments", "run_20260101_000000", 10, 20)
    experiment(tmp_path / "experiments", "run_20260102_000000", 30, 31, 32)
    experiment(tmp_path / "experiments", "run_20260103_000000")
    return tmp_path


@pytest.fixture
def typed(root: Path) -> Typed:
    return lambda *words, **env: typed_in(["checkpoint", *words], root, COLUMNS="100", **env)


def saved(root: Path, step: int, experiment: str = "run_20260102_000000") -> Path:
    return checkpoint_store.final_path(
        root / "experiments" / experiment / "outputs/checkpoints", step
    )


def flip(file: Path) -> None:
    file.write_bytes(b"X" + file.read_bytes()[1:])


# -- ls ---------------------------------------------------------------------------------------


def test_ls_shows_newest_experiment_with_checkpoints(root: Path, typed: Typed) -> None:
    (saved(root, 32) / "__0_0.distcp").unlink()
    (saved(root, 31) / "manifest.json").write_text("{")
    change(saved(root, 30), created=time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1)))
    code, out, err = typed("ls")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(saved(root, 30).parent)
    assert lines[1].split() == ["step", "when", "size", "world", "state"]
    assert lines[2].startswith("  32  ")
    assert lines[2].endswith("  2 kB      2  incomplete: __0_0.distcp is missing")
    assert "  31  -                       -      -  incomplete: manifest.json" in out
    assert lines[3] == "  30  2026-01-02 03:04:05  2 kB      2  complete"


def test_ls_json_has_all_fields(root: Path, typed: Typed) -> None:
    os.truncate(saved(root, 20, "run_20260101_000000") / ".metadata", 1)
    code, out, err = typed("ls", "run_20260101_000000", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["directory"] == str(saved(root, 20, "run_20260101_000000").parent)
    newest, whole = told["checkpoints"]
    assert newest.pop("created") >= whole.pop("created")
    problem = ".metadata has 1 bytes instead of 5"
    path = saved(root, 20, "run_20260101_000000")
    assert newest == {
        **{"step": 20, "path": str(path), "size": 2005, "world": 2},
        **{"complete": False, "problem": problem},
    }
    assert (whole["step"], whole["complete"], whole["problem"]) == (10, True, None)


@pytest.mark.parametrize(
    "words",
    [
        ["experiments/run_20260101_000000"],
        ["--experiments", "experiments", "run_20260101_000000"],
        ["--experiments", "none", "experiments/run_20260101_000000/outputs/checkpoints"],
        # Other commands accept the same options.
        ["--nodes", "none", "--ssh-config", "none", "run_20260101_000000"],
    ],
)
def test_ls_accepts_every_form_of_name(typed: Typed, words: list[str]) -> None:
    code, out, _ = typed("ls", *words, "--json")
    assert code == 0 and [one["step"] for one in json.loads(out)["checkpoints"]] == [20, 10]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "run_20260101_00000"], "did you mean 'run_2026010"),
        (["ls", "run_20260103_000000"], "/run_20260103_000000/outputs/checkpoints"),
        (["verify", "--experiments", "none"], "no experiment in none has a checkpoint"),
        (["verfy"], "'verfy' is not one of 'ls', 'verify', 'export'"),
        (["ls", "--jsn"], "no such option --jsn; did you mean --json?"),
        (["export"], "export also OUT"),
        (["export", "a", "b", "c"], "export also OUT"),
        (["export", "--step", "31", "run_20260101_000000", "out"], "there are: 20, 10"),
        (["export", "--dtype", "fp8", "out"], "'fp32', 'bf16', 'fp16'"),
    ],
)
def test_commands_refuse_unknown_names(typed: Typed, words: list[str], said: str) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "") and said in err


def test_ls_escapes_unprintable_names(root: Path, typed: Typed) -> None:
    save(root / "a\nb €", 5)
    for encoding, name in (("utf-8", "a\\nb €'"), ("latin-1", "a\\nb \\u20ac'")):
        code, out, _ = typed("ls", "a\nb €", PYTHONIOENCODING=encoding)
        assert code == 0 and out.splitlines()[0].endswith(name)
        assert len(out.splitlines()) == 3


def test_ls_is_quiet_if_reader_closes_pipe(typed: Typed, root: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"'{ORCHESTRATOR}' checkpoint ls | head -c 1 >/dev/null"],
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_completion_offers_experiments_and_quotes_none_that_shell_would_run(root: Path) -> None:
    def complete(words: str) -> list[str]:
        place = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        env = {**place, "_ORCHESTRATOR_COMPLETE": "bash_complete"}
        return typed_in([], root, **env)[1].split()

    # A shell would run the command in this name.
    theirs = root / "experiments/run_$(id)_20260104_000000"
    theirs.mkdir()
    (theirs / "job.json").touch()
    assert complete("orchestrator checkpoint ") == ["plain,ls", "plain,verify", "plain,export"]
    for command in ("ls", "verify", "export"):
        names = [f"plain,run_2026010{day}_000000" for day in (1, 2, 3)]
        assert complete(f"orchestrator checkpoint {command} run") == names
    assert complete("orchestrator checkpoint ls else") == ["dir,else"]
    assert complete("orchestrator checkpoint export --dtype f") == ["plain,fp32", "plain,fp16"]


# -- verify -----------------------------------------------------------------------------------


def test_verify_reports_good_checkpoints(root: Path, typed: Typed) -> None:
    code, out, err = typed("verify")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(saved(root, 30).parent)
    for line, step in zip(lines[1:], (32, 31, 30), strict=True):
        assert line.startswith(f"step {step}: good (2 kB in 0.")


def test_verify_names_damage_and_step_to_resume_from(root: Path, typed: Typed) -> None:
    flip(saved(root, 32) / "__0_0.distcp")
    flip(saved(root, 32) / "__1_0.distcp")
    (saved(root, 30) / ".metadata").unlink()
    code, out, _ = typed("verify")
    assert code == 1
    assert out.splitlines()[1:4] == [
        "step 32: DAMAGED",
        "  __0_0.distcp is damaged: its sha256 is not the manifest's",
        "  __1_0.distcp is damaged: its sha256 is not the manifest's",
    ]
    assert out.splitlines()[5:] == [
        "step 30: DAMAGED",
        "  .metadata is missing",
        "the newest good one is step 31; to resume from it:"
        f" --set checkpoint.resume={saved(root, 31)}",
    ]
    code, out, _ = typed("verify", "--json")
    told = json.loads(out)
    assert (code, told["newest_good"]) == (1, 31)
    assert [len(one["problems"]) for one in told["checkpoints"]] == [2, 0, 1]


def test_verify_checks_single_checkpoint(root: Path, typed: Typed) -> None:
    flip(saved(root, 32) / ".metadata")
    code, out, _ = typed("verify", str(saved(root, 32)))
    assert code == 1 and out.splitlines()[-1] == "no training can resume from any of them"
    assert typed("verify", str(saved(root, 31)))[0] == 0


def test_verify_skips_checkpoint_pruned_during_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checkpoint_store.resolve_checkpoints(None, root / "experiments")
    checkpoint_store.prune_checkpoints(saved(root, 30).parent, 2)
    monkeypatch.setattr(checkpoint_store, "resolve_checkpoints", lambda *places: found)
    with output.json_alone():
        assert checkpoints.verify_checkpoints(Where(experiments=root / "experiments"), None) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in told["checkpoints"]] == [32, 31]


def test_verify_shows_progress_on_terminal_and_clears_it(root: Path) -> None:
    big = root / "big"
    save(big, 1, {f"__{rank}_0.distcp": bytes(1 << 20) for rank in range(6)})
    slow = "import time; from orchestrator.records import checkpoint_store as c\n"
    slow += "from orchestrator.head.screen import progress as k\n"
    slow += "read = c.describe_file; k.FRAME_SECONDS = 0.02\n"
    slow += "c.describe_file = lambda *a, **o: (time.sleep(0.1), read(*a, **o))[1]\n"
    slow += "import orchestrator.entry; orchestrator.entry.main()"
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", slow, "checkpoint", "verify", str(big)],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
    ) as running:
        out, _ = running.communicate(timeout=20)
    os.close(follower)
    seen = ""
    # The other side has closed the socket.
    with contextlib.suppress(OSError):
        while piece := os.read(leader, 10_000):
            seen += piece.decode()
    os.close(leader)
    assert running.returncode == 0 and "MB of 6.29 MB" in seen
    assert seen.endswith("\r\x1b[K") and "step 1: good" in out
    assert "MB of" not in out


# -- export -----------------------------------------------------------------------------------


def test_export_without_torch_says_what_is_needed(root: Path) -> None:
    (root / "hidden").mkdir()
    (root / "hidden" / "sitecustomize.py").write_text("import sys; sys.modules['torch'] = None\n")
    done = subprocess.run(
        [ORCHESTRATOR, "checkpoint", "export", "out"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "hidden"), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    err = done.stderr
    assert (done.returncode, done.stdout) == (3, "")
    assert f"exporting needs torch, and {Path(sys.executable).parent}/python" in err
    assert "on a node" in err


def test_export_refuses_if_no_checkpoint_is_complete(root: Path, typed: Typed) -> None:
    for step in (30, 31, 32):
        (saved(root, step) / "__0_0.distcp").unlink()
    code, out, err = typed("export", "out")
    assert (code, out) == (3, "") and "the newest, of step 32: __0_0.distcp is missing" in err
