"""What was downloaded has the hashes that the user wrote down."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.environments import requirements, wheels
from tests.head.environments.test_requirements import LINUX, wheel

GOOD = hashlib.sha256(b"wheel").hexdigest()
OTHER = "0" * 64
FILE = f"""
# a comment
My.Package[extra]==1.0 ; python_version > "3" \\
    --hash=sha256:{OTHER} \\
    --hash=sha256:{GOOD.upper()}
other==2
""".encode()


@pytest.mark.slow
@pytest.mark.parametrize("total", [GOOD, ""])
def test_a_wheel_without_any_of_its_hashes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel(tmp_path, "mine", "1.0")
    total = total or hashlib.sha256(next(tmp_path.glob("*.whl")).read_bytes()).hexdigest()
    file = tmp_path / "requirements.txt"
    file.write_text(f"mine==1.0 --hash=sha256:{OTHER} --hash=sha256:{total}\n")
    sources = requirements.read((str(file),), (str(tmp_path),), index=False)
    if total == GOOD:
        with pytest.raises(CheckFailed, match=r"(?i)hash"):
            wheels.wheels_for(LINUX, "0" * 16, sources)
    else:
        (found,) = wheels.wheels_for(LINUX, "0" * 16, sources).glob("*.whl")
        assert found.name == "mine-1.0-py3-none-any.whl"


def test_hashes_are_read_with_what_they_are_of() -> None:
    sha512 = f"-r more.txt\n\0my-package==1.0 --hash sha512:{'a' * 128}".encode()  # included
    assert requirements.hashes_of(sha512) == {"my-package": {f"sha512:{'a' * 128}"}}
    assert requirements.hashes_of(FILE) == {"my-package": {f"sha256:{OTHER}", f"sha256:{GOOD}"}}


def test_of_the_hashes_of_an_index_the_users_are_left() -> None:
    pinned = "--index-url https://x/simple\nmy-package==1.0 \\\n  --hash=sha256:{} \\\n"
    pinned += f"  --hash=sha256:{'1' * 64}\nother==2 --hash=sha256:{OTHER}\n"
    allowed = requirements.hashes_of(FILE)
    assert requirements.keep_hashes(pinned.format(GOOD), allowed, "no").splitlines() == [
        "--index-url https://x/simple",
        f"my-package==1.0 --hash=sha256:{GOOD}",
        f"other==2 --hash=sha256:{OTHER}",
    ]
    with pytest.raises(CheckFailed, match="none of the hashes of my-package"):
        requirements.keep_hashes(pinned.format("2" * 64), allowed, "no")
