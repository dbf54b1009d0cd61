"""Certificates of the server, checked before a model is loaded."""

from __future__ import annotations

import os
import ssl

from kvsieve.errors import InputError

_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


def read_pair(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    """Return the paths of a certificate and its key, or None without both.

    Args:
        certificate: PEM file with the server's certificate first, then those between it and a root.
        key: PEM file with its private key, not encrypted.

    Raises InputError for one without the other, and for files that do not serve as a pair.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InputError("--tls-cert and --tls-key go together: name the file of the certificate and that of its key")
    paths = os.path.expanduser(certificate), os.path.expanduser(key)
    for option, path in zip(("--tls-cert", "--tls-key"), paths, strict=True):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise InputError(f"{option} {path!r} cannot be read: {error.strerror}") from error
    _check_certificate(paths[0])
    _check_pair(*paths)
    return paths


def _check_certificate(path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InputError(
            f"--tls-cert {path!r} has no certificate in PEM ({_reason(error)}): expected text that begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from error


def _check_pair(certificate: str, key: str) -> None:
    def refuse() -> str:
        # Asked for on the terminal otherwise, also by a service that has none.
        raise InputError(f"--tls-key {key!r} is encrypted: write it without a passphrase, readable by its user only")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            raise InputError(f"--tls-key {key!r} is not the key of the certificate {certificate!r}") from error
        raise InputError(
            f"--tls-key {key!r} cannot be used with the certificate ({_reason(error)}): expected a private key in PEM"
        ) from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
