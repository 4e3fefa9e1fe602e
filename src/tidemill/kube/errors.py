"""What an API server refuses, by what a caller can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An answer outside 2xx. `reason` is Kubernetes' machine-readable word, such as NotFound."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message

    @property
    def retryable(self) -> bool:
        """Whether the same request may go through later without anybody changing something."""
        return self.code in (408, 429) or self.code >= 500

    @staticmethod
    def of(code: int, status: Mapping[str, Any] | None, text: str = "") -> ApiError:
        """The error for a `Status` object, or for a body that is none (a proxy's HTML, say)."""
        reason = str((status or {}).get("reason") or "")
        message = str((status or {}).get("message") or text[:200] or "no message")
        code = int((status or {}).get("code") or code)
        cls = _BY_REASON.get(reason) or _BY_CODE.get(code, ApiError)
        return cls(code, reason or "Unknown", message)


class NotFoundError(ApiError):
    """The object, or its whole kind, is not there."""


class ForbiddenError(ApiError):
    """The role of this process does not allow it; the message names verb and kind."""


class ConflictError(ApiError):
    """The object changed since it was read: read again and decide again."""


class AlreadyExistsError(ApiError):
    """Another object has this name."""


class GoneError(ApiError):
    """The resourceVersion is no longer known: list again."""


class InvalidError(ApiError):
    """The object breaks its schema: retrying the same cannot help."""


_BY_REASON: dict[str, type[ApiError]] = {
    "NotFound": NotFoundError,
    "Forbidden": ForbiddenError,
    "Conflict": ConflictError,
    "AlreadyExists": AlreadyExistsError,
    "Expired": GoneError,
    "Gone": GoneError,
    "Invalid": InvalidError,
}
_BY_CODE: dict[int, type[ApiError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
}
