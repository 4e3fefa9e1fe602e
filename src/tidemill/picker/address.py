"""Addresses of endpoints in one canonical form, so that equal ones compare equal."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


def join(ip: str, port: int) -> str:
    """`10.0.0.11:8000`, `[fd00::5]:8000`. Raises ValueError for what is no IP address."""
    address = ipaddress.ip_address(ip)
    return f"[{address.compressed}]:{port}" if address.version == 6 else f"{address}:{port}"


@lru_cache(maxsize=16_384)
def canonical(text: str) -> str | None:
    """The canonical form of an address with a port; None for anything else (an IPv6 address without
    brackets could end in a port or not, so it is none)."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        return None
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return None
    if bracketed != (address.version == 6):
        return None
    return join(str(address), int(port))
