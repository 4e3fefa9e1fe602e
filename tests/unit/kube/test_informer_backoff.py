"""The informer against a server that misbehaves politely, in virtual time. The client is a stub, because no
real server closes every watch at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.clock import run_virtual

from tidemill.kube.client import ListPage, WatchEvent
from tidemill.kube.errors import ApiError, ForbiddenError, NotFoundError
from tidemill.kube.informer import Informer, identity
from tidemill.kube.resources import PODS


class StubClient:
    """Counts requests; `watch` ends at once."""

    def __init__(self, *, list_error: ApiError | None = None) -> None:
        self.requests = 0
        self.list_error = list_error

    async def list(self, *_: object, **__: object) -> ListPage:
        self.requests += 1
        if self.list_error is not None:
            raise self.list_error
        return ListPage([], "1", "")

    async def watch(self, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
        self.requests += 1
        return
        yield


def requests_in(seconds: float, client: StubClient) -> int:
    async def main() -> int:
        informer = Informer(client, PODS, decode=identity, draw=lambda: 0.0)  # type: ignore[arg-type]
        task = asyncio.create_task(informer.run())
        await asyncio.sleep(seconds)
        task.cancel()
        return client.requests

    return run_virtual(main())


def test_a_watch_that_is_closed_at_once_backs_off() -> None:
    assert 3 <= requests_in(30, StubClient()) <= 15


def test_a_refusing_server_is_not_stormed() -> None:
    assert 3 <= requests_in(30, StubClient(list_error=ApiError(500, "InternalError", "x"))) <= 15


FORBIDDEN = ForbiddenError(403, "Forbidden", 'pods is forbidden: cannot list resource "pods"')


def test_what_the_role_may_not_list_is_said_and_asked_for_now_and_then() -> None:
    assert 2 <= requests_in(61, StubClient(list_error=FORBIDDEN)) <= 3


@pytest.mark.parametrize("optional", [True, False])
def test_an_optional_kind_that_may_not_be_listed_holds_nothing_up(optional: bool) -> None:
    async def main() -> tuple[bool, bool, str | None]:
        client = StubClient(list_error=FORBIDDEN)
        informer = Informer(client, PODS, decode=identity, optional=optional)  # type: ignore[arg-type]
        task = asyncio.create_task(informer.run())
        await asyncio.sleep(1)
        task.cancel()
        return informer.synced, informer.absent, informer.error

    synced, absent, error = run_virtual(main())
    assert (synced, absent) == (optional, optional)
    assert error is not None
    assert 'cannot list resource "pods"' in error


def test_an_absent_kind_is_asked_for_now_and_then() -> None:
    assert 2 <= requests_in(61, StubClient(list_error=NotFoundError(404, "NotFound", "x"))) <= 3
