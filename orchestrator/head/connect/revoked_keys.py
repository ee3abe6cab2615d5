"""Refuse a host key that the user's RevokedHostKeys names: a list of keys, or ssh-keygen's KRL."""

from __future__ import annotations

import base64
import subprocess
import tempfile
from pathlib import Path

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.host_certificate import Certificate, first_text
from orchestrator.head.connect.light_paramiko import paramiko

KRL = b"SSHKRL\n\0"


def refuse_revoked(
    file: Path, key: paramiko.PKey, certificate: Certificate | None, shown: str
) -> None:
    """Raise if the key, or what signed it, is revoked; like ssh, also if the file is not there."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NodeError(
            f"whether its host key is revoked cannot be seen: {file}: {error.strerror}",
            "without that file ssh trusts no host at all; make it, if need be an empty one",
        ) from error
    blobs = {key.asbytes()} | ({certificate.authority} if certificate else set())
    if content.startswith(KRL):
        revoked = _in_krl(file, key, certificate)
    else:
        revoked = any(blob in blobs for blob in _listed(content))
    if revoked:
        raise NodeError(f"its host key is revoked in {file}: {shown}", "do not connect to it")


def _listed(content: bytes) -> list[bytes]:
    blobs = []
    for line in content.splitlines():
        fields = line.split()
        if len(fields) >= 2 and not fields[0].startswith(b"#"):
            try:
                blobs.append(base64.b64decode(fields[1]))
            except ValueError:
                continue
    return blobs


def _in_krl(file: Path, key: paramiko.PKey, certificate: Certificate | None) -> bool:
    """Ask ssh-keygen, which alone reads its own format."""
    blob = certificate.blob if certificate else key.asbytes()
    line = f"{first_text(blob)} {base64.b64encode(blob).decode()}\n"
    with tempfile.NamedTemporaryFile(suffix=".pub") as public:
        public.write(line.encode())
        public.flush()
        try:
            done = subprocess.run(
                ["ssh-keygen", "-Q", "-f", str(file), public.name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise NodeError(
                f"ssh-keygen is needed to read {file}: {error.strerror}",
                "install it (Debian, Ubuntu: apt-get install openssh-client)",
            ) from error
    if done.returncode not in (0, 1):
        raise NodeError(f"{file} cannot be read: {done.stderr.strip()}")
    return done.returncode == 1
