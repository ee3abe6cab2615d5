"""Host certificates, as an SSH authority signs them for the machines of a site.

paramiko checks that the host owns the key in its certificate, and nothing else. The format is that
of PROTOCOL.certkeys in OpenSSH's sources.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from orchestrator.head.connect.light_paramiko import paramiko

HOST = 2  # the type of certificate that is not a user's
FIELDS_OF_KEY = {"ssh-rsa": 2, "ssh-ed25519": 1}  # and 2 for ecdsa-*: the curve and the point


@dataclass(frozen=True)
class Certificate:
    """The parts of a certificate that decide whether it counts."""

    blob: bytes
    kind: int
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    critical: bytes  # options that must be understood; there are none for hosts
    authority: bytes  # the public key that signed
    signed: bytes
    signature: bytes

    @staticmethod
    def of_key(key: paramiko.PKey) -> Certificate | None:
        """Return the certificate that came with a host's key, if one did."""
        public = getattr(key, "public_blob", None)
        if public is None:
            return None
        blob = bytes(public.key_blob)
        message = paramiko.Message(blob)
        for _ in range(2 + FIELDS_OF_KEY.get(key.get_name(), 2)):  # its type and a nonce first
            message.get_binary()
        message.get_int64()  # the serial number
        kind = message.get_int()
        message.get_binary()  # the name that the authority has for it
        listed = paramiko.Message(message.get_binary())
        principals = []
        while listed.get_remainder():
            principals.append(listed.get_binary().decode(errors="replace"))
        after, before = message.get_int64(), message.get_int64()
        critical, _, _ = (message.get_binary() for _ in range(3))
        authority = message.get_binary()
        signed = blob[: len(blob) - len(message.get_remainder())]
        signature = message.get_binary()
        return Certificate(
            *(blob, kind, tuple(principals), after, before, critical),
            *(authority, signed, signature),
        )


def why_invalid(certificate: Certificate, host: str, algorithms: tuple[str, ...]) -> str:
    """Say why a certificate of a trusted authority does not count for this host, or nothing."""
    if certificate.kind != HOST:
        return "is not one for hosts"
    if not certificate.valid_after <= time.time() < certificate.valid_before:
        return "is not valid at this time"
    if certificate.principals and not any(
        _matches(host, pattern) for pattern in certificate.principals
    ):
        return f"is for {', '.join(certificate.principals)}"
    if certificate.critical:
        return "has an option that is not understood"
    algorithm = first_text(certificate.signature)
    if algorithms and algorithm not in algorithms:
        return f"is signed with {algorithm}"
    try:
        authority = paramiko.PKey.from_type_string(
            first_text(certificate.authority), certificate.authority
        )
        signature = paramiko.Message(certificate.signature)
        good = authority.verify_ssh_sig(certificate.signed, signature)
    except (paramiko.SSHException, ValueError) as error:
        return f"cannot be checked ({error})"
    return "" if good else "has a wrong signature"


def first_text(blob: bytes) -> str:
    """Return the name that a key, a certificate or a signature begins with."""
    return bytes(paramiko.Message(blob).get_binary()).decode(errors="replace")


def _matches(host: str, pattern: str) -> bool:
    wild = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, host) is not None
