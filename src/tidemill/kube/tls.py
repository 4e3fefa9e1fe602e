"""Certificates of ports that serve TLS: the operator's, read again when they change, or one signed by itself."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

CERTIFICATE, KEY = "tls.crt", "tls.key"
_LOOK = 0.5  # seconds between two looks at the files


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Certificate chain and private key, in PEM."""

    certificate: bytes
    key: bytes


def self_signed(common_name: str, now: dt.datetime) -> KeyPair:
    """A certificate for clients that encrypt without asking who answers."""
    # Only who signs needs all this.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def read_pair(directory: Path) -> KeyPair:
    """tls.crt and tls.key of a directory. Raises OSError or ssl.SSLError when they are no pair."""
    pair = KeyPair((directory / CERTIFICATE).read_bytes(), (directory / KEY).read_bytes())
    server_context(pair)
    return pair


def server_context(pair: KeyPair, *, protocol: str = "h2") -> ssl.SSLContext:
    """A context that offers HTTP/2, or another `protocol` (ALPN). Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    load(context, pair)
    return context


def load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Have new handshakes of `context` use `pair`."""
    # ssl reads key pairs from files only.
    with tempfile.TemporaryDirectory() as directory:
        certificate, key = Path(directory) / CERTIFICATE, Path(directory) / KEY
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        context.load_cert_chain(certificate, key)


async def watch_pair(directory: Path, changed: Callable[[KeyPair], None]) -> None:
    """Call `changed` with each new good pair, until cancelled. A pair that does not fit together, as while one
    file is replaced after the other, changes nothing."""
    seen: KeyPair | None = None
    said = ""
    while True:
        try:
            pair = await asyncio.to_thread(read_pair, directory)
            if seen is not None and pair != seen:
                changed(pair)
                log.info("certificate reloaded", directory=str(directory))
            seen, said = pair, ""
        except (OSError, ssl.SSLError) as error:
            if str(error) != said:
                said = str(error)
                log.warning(
                    "certificate cannot be used; the one in use stays", directory=str(directory), error=said
                )
        await asyncio.sleep(_LOOK)
