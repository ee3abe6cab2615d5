"""A launch's manifest; here: how a file travels that a rank lacks."""

import json
from pathlib import Path

import pytest

from orchestrator.records import experiments, manifest

LACKS = "FileNotFoundError: [Errno 2] No such file or directory: "
NODE = "/home/u/.orchestrator/code/snapshots/1a0f4fb4-0"


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (f"{LACKS}'data/a b/train.bin'", "--set 'sync.include=[data/a b/*]' sends it"),
        (f"{LACKS}'words.txt'", "words.txt is in your directory and was not sent"),
        (f"{LACKS}'{NODE}/TREE/words.txt'", "--set 'sync.include=[words.txt]' sends it"),
        (f"{LACKS}'/TREE/words.txt'", "orchestrator push /TREE/words.txt brings it"),
        (f"{LACKS}'elsewhere.txt'", ""),
        (f"{LACKS}'{'x' * 5000}'", ""),
        ("ValueError: 'words.txt' is too long", ""),
        ("FileNotFoundError: words.txt", ""),
    ],
)
def test_not_sent_explains_missing_file(message: str, fix: str, tmp_path: Path) -> None:
    tree = tmp_path / "w/proj"
    (tree / "data/a b").mkdir(parents=True)
    for name in ("data/a b/train.bin", "words.txt"):
        (tree / name).write_text("x")
    message = message.replace(f"{NODE}/TREE", f"{NODE}/{'/'.join(tree.parts[-3:])}")
    message, fix = (each.replace("/TREE", str(tree)) for each in (message, fix))
    directory = experiments.create_experiment(tmp_path, "run")
    assert manifest.send_hint(directory, message) == ""
    for sent in (True, False):  # nodes that share the directory lack it, as it was not there
        known = {"directory": str(tree), "tree": "abc" if sent else None}
        (directory.path / "manifest.json").write_text(json.dumps(known))
        said = manifest.send_hint(directory, message)
        assert (fix in said and bool(said) == bool(fix)) if sent else not said
