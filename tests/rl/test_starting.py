"""A server that does not start is told at once, whatever else is starting beside it."""

import asyncio
from contextlib import AsyncExitStack, ExitStack

import pytest

from rl import cluster
from rl.config import ClusterConfig
from rl.starting import ended, while_starting


async def fails(after_s=0.0):
    await asyncio.sleep(after_s)
    raise RuntimeError("engine-0 died")


async def endless(ended):
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


def run(make):
    async def within():
        async with asyncio.timeout(30):
            return await make()

    return asyncio.run(within())


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_a_failure_ends_the_work_beside_it(after_s):
    ended = []

    async def both():
        starting = asyncio.create_task(fails(after_s))
        await asyncio.sleep(0.01)
        await while_starting(starting, endless(ended))

    with pytest.raises(RuntimeError, match="engine-0 died"):
        run(both)
    assert ended == [True] or (after_s == 0.0 and ended == [])  # cancelled before it began


def test_work_goes_on_after_the_servers_are_there_and_without_any():
    async def both():
        starting = asyncio.create_task(asyncio.sleep(0, "served"))
        return await while_starting(starting, asyncio.sleep(0.05, "trained")), await while_starting(
            None, asyncio.sleep(0, "alone")
        )

    assert run(both) == ("trained", "alone")


def test_the_works_own_failure_and_its_cancellation_are_its_own():
    ended = []

    async def both():
        starting = asyncio.create_task(endless([]))
        with pytest.raises(RuntimeError, match="engine-0 died"):
            await while_starting(starting, fails())
        waiting = asyncio.create_task(while_starting(starting, endless(ended)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not starting.done()
        starting.cancel()

    run(both)
    assert ended == [True]


@pytest.mark.parametrize("work", [endless, fails], ids=["it starts still", "it failed"])
def test_what_was_starting_has_ended_before_its_parts_are_closed(work):
    order = []

    async def begins():
        try:
            await (fails() if work is fails else endless([]))
        finally:
            order.append("starting")

    async def whole():
        async with AsyncExitStack() as stack:
            stack.callback(order.append, "parts")
            starting = asyncio.create_task(begins())
            stack.push_async_callback(ended, starting)
            await asyncio.sleep(0.01)

    run(whole)
    assert order == ["starting", "parts"]


class SlowRay:
    """Ray as it is on a machine that is too busy, the first times."""

    def __init__(self, slow):
        self.slow, self.calls = slow, []

    def init(self, **settings):
        self.calls.append("init")
        if self.calls.count("init") <= self.slow:
            raise Exception("The current node timed out during startup. This could happen because")

    def shutdown(self):
        self.calls.append("shutdown")


def start_slowly(monkeypatch, slow):
    ray = SlowRay(slow)
    monkeypatch.setattr(cluster, "ray", ray)
    with ExitStack() as stack:
        cluster.start_ray(ClusterConfig(), stack)
    return ray.calls


def test_a_ray_that_was_too_slow_is_started_once_more(monkeypatch, caplog):
    assert start_slowly(monkeypatch, 1) == ["init", "shutdown", "init", "shutdown"]
    assert "did not start within 30 s" in caplog.text
    with pytest.raises(RuntimeError, match="within 30 s, twice"):
        start_slowly(monkeypatch, 2)
