"""A certificate for one pool. It is both authority and identity of all members, and it is deleted with the pool."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(days=1)  # the certificate must also be valid on nodes with a wrong clock


@dataclass(frozen=True, slots=True, repr=False)
class PoolCertificate:
    """PEM texts of a self-signed certificate and its key. Not shown in logs."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "PoolCertificate(...)"


def make_certificate(pool_id: str) -> PoolCertificate:
    """Make a certificate for a pool. A P-256 key is made a thousand times faster than an RSA key of 3072 bits, and is
    as strong (NIST SP 800-57).
    """
    # a process that joins a pool makes no certificate
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"skyward {pool_id}"[:64])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return PoolCertificate(
        certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
    )
