from __future__ import annotations

import pytest

from orchestrator.head.launch.redact import redacted, redacted_command

HIDDEN = "(redacted)"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
     "PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "SSH_KEY_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS",
     "OPENAI_API_KEY", "PRIVATE_KEY", "SESSION_COOKIE", "github_token", "ApiKey", "BASIC_AUTH",
     "KEY", "API", "TOKENS"],
)  # fmt: skip
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert redacted({name: "s3cret"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "PWD", "OLDPWD", "LANG", "NCCL_DEBUG", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
     "KEYBOARD_LAYOUT", "COMPASS_DIR", "CAPITAL", "OMP_NUM_THREADS", "AUTHOR", "PYTHONPATH"],
)  # fmt: skip
def test_what_is_none_stays(name: str) -> None:
    assert redacted({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://bob:pw@proxy:3128", f"http://{HIDDEN}@proxy:3128"),
        ("postgres://u:p@ss@db/x", f"postgres://{HIDDEN}@db/x"),
        ("redis://:pw@cache/0", f"redis://{HIDDEN}@cache/0"),
        ("a=https://u:p@h/x b=https://v:q@i/y", f"a=https://{HIDDEN}@h/x b=https://{HIDDEN}@i/y"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("ssh://git@host/repo", "ssh://git@host/repo"),
        ("user:pw@host", "user:pw@host"),  # no URL: scp's host:path looks like this, too
    ],
)
def test_a_login_in_a_url(value: str, shown: str) -> None:
    assert redacted({"PROXY": value}) == {"PROXY": shown}
    assert redacted_command(["run", value]) == ["run", shown]


def test_names_come_in_order() -> None:
    assert list(redacted({"B": "", "A": "", "C": ""})) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "x", "y"], ["--token", HIDDEN, "y"]),
        (["--hf-token=x"], [f"--hf-token={HIDDEN}"]),
        (["--api-key", "x=y"], ["--api-key", HIDDEN]),
        (["HF_TOKEN=x", "train.py"], [f"HF_TOKEN={HIDDEN}", "train.py"]),
        (["--env", "WANDB_API_KEY=x"], ["--env", f"WANDB_API_KEY={HIDDEN}"]),
        (["--lr", "3e-4", "--name=a=b"], ["--lr", "3e-4", "--name=a=b"]),
        (["token", "x"], ["token", "x"]),
        (["--db", "postgres://u:p@h/x"], ["--db", f"postgres://{HIDDEN}@h/x"]),
        ([], []),
    ],
)
def test_a_command_line(words: list[str], shown: list[str]) -> None:
    assert redacted_command(words) == shown
