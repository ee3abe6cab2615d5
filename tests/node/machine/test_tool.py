"""Tools that end, fail, hang and leave something behind."""

from pathlib import Path

from orchestrator.node.machine import tool
from tests.node.running import alive, wait_until


def run(*argv: str, seconds: float = 20.0, **env: str) -> tuple[str, str]:
    return tool.run_tool(argv, seconds, env)[:2]


def test_run_returns_output() -> None:
    assert run("sh", "-c", "echo hello $NAME; echo noise >&2", NAME="you") == ("hello you\n", "")
    assert run("printf", r"\377") == ("\ufffd", "")


def test_run_explains_failure() -> None:
    out, problem = run("sh", "-c", "echo some; echo 'no driver' >&2; exit 9")
    assert (out, problem) == ("some\n", "sh ended with exit code 9: no driver")
    assert (
        run("sh", "-c", "echo 'No devices'; exit 6")[1] == "sh ended with exit code 6: No devices"
    )
    assert run("no-such-tool-here") == ("", "no-such-tool-here is not installed")


def test_run_explains_unusable_tool(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert run(str(broken))[1] == "broken cannot be run: Exec format error"


def test_run_ends_hanging_tool_with_children(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/child; echo begun; trap '' TERM; sleep 1000"
    out, problem = run("sh", "-c", script, seconds=0.5)
    assert (out, problem) == ("", "sh did not end within 0.5 s")
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))


def test_run_does_not_wait_for_daemon() -> None:
    """A daemon that a tool starts keeps its output open; run() does not wait for it."""
    assert run("sh", "-c", "sleep 15 & echo done") == ("done\n", "")
