"""When a server counts as idle, by what it says of its load at one moment after another."""

import asyncio
import itertools
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.engine.protocol import EngineError
from rollout.engine.sglang_http import Timeouts
from rollout.engine.sglang_weights import BUSY_POLL_S, IDLE_POLL_S, IDLE_S, SGLangWeights


def load(running, moment, waiting=0):
    return {"num_running_reqs": running, "num_waiting_reqs": waiting, "timestamp": moment}


def readings_until_idle(answers, waiting=True, **timeouts):
    """How often it was asked, and for how long; the last answer is given again and again."""
    asked = 0

    async def loads(request):
        nonlocal asked
        asked += 1
        return web.json_response({"loads": next(told)})

    async def run():
        app = web.Application()
        app.add_routes([web.get("/v1/loads", loads)])
        async with TestServer(app) as server, SGLangWeights(str(server.make_url("")), Timeouts(**timeouts)) as engine:
            begin = time.monotonic()
            await engine.until_idle(waiting)
            return time.monotonic() - begin

    told = itertools.chain(answers, itertools.repeat(answers[-1]))
    return asyncio.run(run()), asked


@pytest.mark.parametrize(
    ("answers", "readings"),
    [
        ([[load(0, 1.0)], [load(0, 1.1)]], 2),
        ([[load(0, 1.0)], [load(3, 1.1)], [load(0, 1.2)], [load(0, 1.3)]], 4),
        ([[load(0, 1.0)], [load(0, 1.1, waiting=1)], [load(0, 1.2)], [load(0, 1.3)]], 4),
        ([[load(0, 1.0), load(2, 1.0)], [load(0, 1.1), load(0, 1.1)], [load(0, 1.2), load(0, 1.2)]], 3),
    ],
    ids=["at once", "one ran", "one waited", "on another rank"],
)
def test_a_server_is_idle_when_it_says_so_of_two_moments_in_a_row(answers, readings):
    assert readings_until_idle(answers)[1] == readings


@pytest.mark.parametrize("moment", [1.0, None], ids=["that sleeps", "that says no time"])
def test_one_that_says_nothing_new_must_say_it_for_a_while(moment):
    seconds, asked = readings_until_idle([[load(0, moment)]])
    assert seconds >= IDLE_S
    assert asked > 1


def test_retracted_requests_need_not_count():
    assert readings_until_idle([[load(0, 1.0, waiting=5)], [load(0, 1.1, waiting=5)]], waiting=False)[1] == 2


def test_a_busy_server_is_asked_less_and_less_often_and_an_idle_one_at_once():
    told = [[load(1, moment)] for moment in range(30)] + [[load(0, 31.0)], [load(0, 32.0)]]
    seconds, asked = readings_until_idle(told)
    assert asked == len(told)
    assert seconds >= sum(min(IDLE_POLL_S * 2**busy, BUSY_POLL_S) for busy in range(30))


def test_a_server_that_stays_busy_is_told():
    with pytest.raises(EngineError, match=r"was not idle within 0\.3 s"):
        readings_until_idle([[load(1, 1.0)]], control_s=0.3)
