from __future__ import annotations

import asyncio

from tests.clock import run_virtual

from tidemill.kube.backoff import Backoff
from tidemill.kube.queue import WorkQueue


def test_wishes_for_one_key_become_one() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(5):
            queue.add("a")
        assert await queue.get() == "a"
        assert len(queue) == 0

    run_virtual(main())


def test_a_key_is_worked_on_by_one_worker_at_a_time_and_comes_again() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        running = most = done = 0

        async def work(key: str) -> None:
            nonlocal running, most, done
            running += 1
            most = max(most, running)
            if done < 3:
                queue.add(key)
            await asyncio.sleep(1)
            running -= 1
            done += 1

        workers = [asyncio.create_task(queue.work(work, lambda *_: None)) for _ in range(4)]
        queue.add("a")
        await asyncio.sleep(60)
        assert (most, done) == (1, 4)
        for worker in workers:
            worker.cancel()

    run_virtual(main())


def test_the_earliest_of_several_delays_counts_and_now_beats_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 10)
        queue.add_after("a", 5)
        queue.add_after("a", 20)
        assert await queue.get() == "a"
        assert loop.time() == 5
        queue.done("a")
        queue.add_after("b", 10)
        queue.add("b")
        assert await queue.get() == "b"
        queue.done("b")
        waiter = asyncio.create_task(queue.get())
        await asyncio.sleep(60)
        assert not waiter.done()
        waiter.cancel()

    run_virtual(main())


def test_failures_come_back_later_and_later_until_forgotten() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue(first_delay=1, max_delay=5)
        times: list[float] = []

        async def fail(key: str) -> None:
            times.append(loop.time())
            raise RuntimeError(key)

        seen: list[str] = []
        worker = asyncio.create_task(queue.work(fail, lambda key, error: seen.append(f"{key}: {error}")))
        queue.add("a")
        await asyncio.sleep(20)
        assert times == [0, 1, 3, 7, 12, 17]
        assert seen[0] == "a: a"
        worker.cancel()

    run_virtual(main())


def test_backoff_doubles_to_its_cap_with_jitter() -> None:
    backoff = Backoff(first=1, cap=8, draw=lambda: 0.0)
    assert [backoff.next() for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    backoff.reset()
    assert backoff.next() == 1
    assert Backoff(first=1, cap=8, draw=lambda: 0.5).next() == 1.25
