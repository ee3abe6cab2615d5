"""What was downloaded has the hashes that the user wrote down."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.environments import hashes

GOOD = hashlib.sha256(b"wheel").hexdigest()
OTHER = "0" * 64
FILE = f"""
# a comment
My.Package[extra]==1.0 ; python_version > "3" \\
    --hash=sha256:{OTHER} \\
    --hash=sha256:{GOOD.upper()}
other==2
""".encode()


def test_a_wheel_without_any_of_its_hashes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_package-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "other-2-py3-none-any.whl").write_bytes(b"anything")
    hashes.check(tmp_path, hashes.wanted(FILE), "no")
    sha512 = f"\0my-package==1.0 --hash sha512:{hashlib.sha512(b'wheel').hexdigest()}".encode()
    hashes.check(tmp_path, hashes.wanted(b"-r more.txt\n" + sha512), "no")  # of an included file
    (tmp_path / "my_package-1.0-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(CheckFailed, match=r"my_package-1\.0.*not\n? ?among those of the file"):
        hashes.check(tmp_path, hashes.wanted(FILE), "no")


def test_nodes_that_download_by_themselves_get_the_users_hashes_alone() -> None:
    pinned = "--index-url https://x/simple\nmy-package==1.0 \\\n  --hash=sha256:{} \\\n"
    pinned += f"  --hash=sha256:{'1' * 64}\nother==2 --hash=sha256:{OTHER}\n"
    kept = hashes.keep(pinned.format(GOOD), hashes.wanted(FILE), "no").splitlines()
    assert kept == [
        "--index-url https://x/simple",
        f"my-package==1.0 --hash=sha256:{GOOD}",
        f"other==2 --hash=sha256:{OTHER}",
    ]
    with pytest.raises(CheckFailed, match="none of the hashes of my-package"):
        hashes.keep(pinned.format("2" * 64), hashes.wanted(FILE), "no")
