"""Signs certificates for one job's nodes and for its head, with a key that is written nowhere."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# The clocks of nodes may be far off, and the keys go with the processes that have them.
BEGIN, END = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 1, 1)


class Authority:
    """A key, and the certificate by which those that it signs are known."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = named("orchestrator head")
        builder = certificate(self.name, self.name, self.key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = pem(builder.sign(self.key, hashes.SHA256()))

    def identity(self, name: str, *, calls: bool = False) -> str:
        """Return a certificate and its key: for the head, which calls, or for a node."""
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.CLIENT_AUTH if calls else ExtendedKeyUsageOID.SERVER_AUTH
        builder = certificate(named(name), self.name, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False
        )
        text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return pem(builder.sign(self.key, hashes.SHA256())) + text.decode("ascii")


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def certificate(
    of: x509.Name, signer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(of)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(END)
    )


def pem(signed: x509.Certificate) -> str:
    return signed.public_bytes(serialization.Encoding.PEM).decode("ascii")
