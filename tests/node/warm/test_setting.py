"""What must be the same for two jobs to start from one warm process."""

from __future__ import annotations

import pytest

from orchestrator.node.warm import setting
from tests.node.running import bare_spec

FORK = ["python", "-u", "/lib/orchestrator/node/job/ranks/fast_torchrun.py", "--nnodes=1"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("LD_LIBRARY_PATH", True),
        ("PYTHONPATH", True),
        ("OMP_NUM_THREADS", True),
        ("TORCH_LOGS", True),
        ("HF_HOME", True),
        ("HF_TOKEN", False),
        ("TORCH_SECRET", False),
        ("WANDB_API_KEY", False),
        ("NODE_RANK", False),
        ("SSH_CONNECTION", False),
        ("LR", False),
        ("MY_PATH", False),
    ],
)
def test_variables_that_matter_at_import(name: str, wanted: bool) -> None:
    assert setting.matters(name) is wanted


def test_a_secret_of_the_job_does_not_enter() -> None:
    env = {"HF_TOKEN": "s3cret", "HF_HOME": "/hf", "LR": "1", "HF_USER": "told secretly"}
    env |= {"HF_ENDPOINT": "https://u:p@h/", "HF_MIRROR": "http://h/?user=told%20secretly"}
    env |= {"HF_OTHER": "hf_abcdefghijklmnopqrstuvwxyz", "TORCH_OTHER": "a l0gin-in-a-word"}
    env |= {"THE_KEY": "l0gin-in-a-word"}
    spec = bare_spec(agent=FORK, env=env, secrets=["HF_USER"])
    variables = setting.import_environment(spec, {"HOME": "/home/u", "PATH": "/bin"})
    assert variables == {"HF_HOME": "/hf", "HOME": "/home/u", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("fields", "environ", "why"),
    [
        ({}, {}, ""),
        ({"start": "plain"}, {}, "--start plain"),
        ({"agent": ["python", "-m", "accelerate.commands.launch"]}, {}, "another launcher"),
        ({}, {"SLURM_STEP_ID": "0"}, "Slurm"),
        ({}, {"PYTHONPATH": "/a:"}, "not absolute"),
        ({"env": {"PYTHONPATH": "src"}}, {}, "not absolute"),
        ({"env": {"PYTHONPATH": "/a:/b"}}, {}, ""),
        ({"unset": ["PYTHONPATH"]}, {"PYTHONPATH": "src"}, ""),
    ],
)
def test_what_can_never_start_warm(
    fields: dict[str, object], environ: dict[str, str], why: str
) -> None:
    spec = bare_spec(**{"agent": FORK, "start": "fork", **fields})
    said = setting.unsuitable(spec, environ)
    assert why in said and bool(said) is bool(why)


def test_differences_are_named() -> None:
    before = {"the Python": "3.11", "LANG": "C", "TZ": "UTC"}
    after = {"the Python": "3.11", "LANG": "de", "OMP_NUM_THREADS": "1"}
    assert setting.differences(before, after) == ["LANG", "OMP_NUM_THREADS", "TZ"]
    assert setting.key_of(before) != setting.key_of(after)
    assert setting.key_of(before) == setting.key_of(dict(reversed(before.items())))
