from dataclasses import replace

import pytest

from orchestrator.common.hiding import hide_secrets
from orchestrator.head.plan.model import EnvSetting
from orchestrator.head.plan.redact import (
    env_apart,
    listed_variables,
    redact_variables,
    redacted_command,
    shown_settings,
)

HIDDEN = "(redacted)"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
     "PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "SSH_KEY_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS",
     "OPENAI_API_KEY", "PRIVATE_KEY", "SESSION_COOKIE", "github_token", "ApiKey", "BASIC_AUTH",
     "KEY", "API", "TOKENS", "GITHUB_PAT", "SENTRY_DSN", "SLACK_WEBHOOK", "WEBHOOK_URL", "SAS_SIG",
     "AZURE_STORAGE_CONNECTION_STRING", "AUTHORIZATION"],
)  # fmt: skip
def test_secret_is_known_by_name(name: str) -> None:
    assert redact_variables({name: "s3cret"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "PWD", "OLDPWD", "LANG", "NCCL_DEBUG", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
     "KEYBOARD_LAYOUT", "PATTERN", "DESIGN", "SIGNAL", "COMPASS_DIR", "CAPITAL", "AUTHOR",
     "OMP_NUM_THREADS", "PYTHONPATH"],
)  # fmt: skip
def test_harmless_value_is_kept(name: str) -> None:
    assert redact_variables({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://bob:pw@proxy:3128", f"http://{HIDDEN}@proxy:3128"),
        ("postgres://u:p@ss@db/x", f"postgres://{HIDDEN}@db/x"),
        ("redis://:pw@cache/0", f"redis://{HIDDEN}@cache/0"),
        ("a=https://u:p@h/x b=https://v:q@i/y", f"a=https://{HIDDEN}@h/x b=https://{HIDDEN}@i/y"),
        ("https://ghp_x@github.com/x", f"https://{HIDDEN}@github.com/x"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("Authorization: Basic dTpwYXNz", f"Authorization: Basic {HIDDEN}"),
        ("Basic rules", "Basic rules"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("ssh://git@host/repo", "ssh://git@host/repo"),
        # This is no URL: scp's host:path also looks like this.
        ("user:pw@host", "user:pw@host"),
    ],
)
def test_login_in_url_is_hidden(value: str, shown: str) -> None:
    assert redact_variables({"PROXY": value}) == {"PROXY": shown}
    assert redacted_command(["run", value]) == ["run", shown]


def test_names_are_sorted() -> None:
    assert list(redact_variables({"B": "", "A": "", "C": ""})) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "x", "y"], ["--token", HIDDEN, "y"]),
        (["--hf-token=x"], [f"--hf-token={HIDDEN}"]),
        (["--api-key", "x=y"], ["--api-key", HIDDEN]),
        (["HF_TOKEN=x", "train.py"], [f"HF_TOKEN={HIDDEN}", "train.py"]),
        (["--env", "WANDB_API_KEY=x"], ["--env", f"WANDB_API_KEY={HIDDEN}"]),
        (["--env", "ANY=s3cretw0rd"], ["--env", f"ANY={HIDDEN}"]),
        (["--env=ANY=s3cret=word"], [f"--env=ANY={HIDDEN}"]),
        (["--env", "PIN=1234"], ["--env", f"PIN={HIDDEN}"]),
        (["--env", "DB_PASSWORD=x"], ["--env", f"DB_PASSWORD={HIDDEN}"]),
        (["--env", "EPOCHS=40", "--env=D=/d/1"], ["--env", "EPOCHS=40", "--env=D=/d/1"]),
        (["--env", "NCCL_DEBUG=INFO", "--env=ANY"], ["--env", "NCCL_DEBUG=INFO", "--env=ANY"]),
        (["--lr", "3e-4", "--name=a=b"], ["--lr", "3e-4", "--name=a=b"]),
        (["token", "x"], ["token", "x"]),
        (["--db", "postgres://u:p@h/x"], ["--db", f"postgres://{HIDDEN}@h/x"]),
        ([], []),
    ],
)
def test_secrets_of_command_line_are_hidden(words: list[str], shown: list[str]) -> None:
    assert redacted_command(words) == shown


def test_listed_shows_known_variables_alone() -> None:
    env = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "MINE": "x",
        "SLURM_JOB_TOKEN": "x",
        "HF_HOME": "/x",
    }
    assert listed_variables(env) == {
        "HF_HOME": "(not shown)",
        "MINE": "(not shown)",
        "NCCL_DEBUG": "INFO",
        "PATH": "/bin",
        "SLURM_JOB_TOKEN": "(not shown)",
    }


def test_settings_show_env_values_unless_secret() -> None:
    chosen = [
        EnvSetting("MINE", "of the config", "config env:", yours=True),
        EnvSetting("MINE", "s3cretw0rd", "--env", yours=True),
        EnvSetting("EPOCHS", "40", "--env", yours=True),
        EnvSetting("MY_PASSWORD", "x", "--env", yours=True),
        EnvSetting("AT", "https://u:p@h/1", "--env", yours=True),
        EnvSetting("THEIRS", "y", "config env:", yours=True),
        EnvSetting("A_TOKEN", "z", "config env:", yours=True),
        EnvSetting("NCCL_DEBUG", "INFO", "--env", yours=True),
    ]
    assert shown_settings(chosen) == {
        "AT": "(yours)",
        "A_TOKEN": HIDDEN,
        "EPOCHS": "40",
        "MINE": "(yours)",
        "MY_PASSWORD": HIDDEN,
        "NCCL_DEBUG": "INFO",
        "THEIRS": "y",
    }


def test_hide_replaces_secret_everywhere() -> None:
    secret = EnvSetting("NCCL_KEY", "hunter2", "--secret", yours=True, secret=True)
    assert shown_settings([secret]) == {"NCCL_KEY": HIDDEN}
    data = {"a": ["--key=hunter2", 3, None], "b": secret}
    hidden = hide_secrets(data, ["hunter2"])
    assert hidden == {"a": [f"--key={HIDDEN}", 3, None], "b": replace(secret, value=HIDDEN)}
    assert hide_secrets(["abc", "ab"], ["ab"]) == ["abc", HIDDEN]
    assert redacted_command(["--secret", "MY_TOKEN", "x"]) == ["--secret", "MY_TOKEN", "x"]
    assert redacted_command(["--secret", "T=hunter2"]) == ["--secret", f"T={HIDDEN}"]


def test_env_apart_splits_values_of_env() -> None:
    given = ["--env", "A=1=2", "--name", "B=3", "--env=C=4", "--env", "D", "x.py", "--env", "E=5"]
    words, values = env_apart(given, given[-3:])
    assert words == [
        *("--env", "A", "--name", "B=3", "--env=C", "--env", "D", "x.py", "--env", "E=5")
    ]
    assert values == {"A": "1=2", "C": "4"}
