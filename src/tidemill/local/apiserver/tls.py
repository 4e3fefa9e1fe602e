"""A certificate authority of one's own, and a serving certificate from it."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FRONT_PROXY = "front-proxy-client"  # common name of the server when it asks another one for somebody


@dataclass(frozen=True, slots=True)
class ServingFiles:
    """Paths of PEM files. `client_*` is what the server shows to extension servers."""

    ca: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path


def issue(directory: Path, *, names: list[str], now: dt.datetime) -> ServingFiles:
    """Write a new CA, and from it a serving certificate for `names` (host names or addresses) and a client's, good
    for a year."""
    directory.mkdir(parents=True, exist_ok=True)
    start, end = now - dt.timedelta(minutes=5), now + dt.timedelta(days=365)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tidemill-local-ca")])
    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())

    def begun(name: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.CertificateBuilder:
        usage = {
            "content_commitment": False, "key_encipherment": False, "data_encipherment": False,
            "key_agreement": False, "encipher_only": False, "decipher_only": False,
        }  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(
                x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True
            )
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=authority, crl_sign=authority, **usage),
                critical=True,
            )
        )

    def leaf(name: str, use: x509.ObjectIdentifier, names: list[str]) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            begun(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, authority=False)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id), critical=False)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    ca = begun(ca_name, ca_key, authority=True).add_extension(ca_id, critical=False).sign(ca_key, hashes.SHA256())
    certificate, key = leaf("kube-apiserver", ExtendedKeyUsageOID.SERVER_AUTH, names)
    client_certificate, client_key = leaf(FRONT_PROXY, ExtendedKeyUsageOID.CLIENT_AUTH, [])
    files = ServingFiles(
        directory / "ca.crt", directory / "tls.crt", directory / "tls.key",
        directory / "front-proxy.crt", directory / "front-proxy.key",
    )  # fmt: skip
    files.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate)
    files.client_certificate.write_bytes(client_certificate)
    for path, secret in ((files.key, key), (files.client_key, client_key)):
        path.touch(mode=0o600)
        path.write_bytes(secret)
    return files


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
