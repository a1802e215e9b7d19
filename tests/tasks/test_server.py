"""The protocol's promises: slots, idempotence, cancellation, limits, and failures with a reason."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from tasks.chat import Chat, Outcome
from tasks.protocol import EpisodeState, Health, Metadata, Task
from tasks.registry import LoadedTask, load_task
from tests.tasks.conftest import gateway, mortal_gateway, serving, until

DATA = {"expression": "3*4-5"}
CALCULATOR = load_task("calculator", {})


def task_of(play: Any) -> LoadedTask:
    return LoadedTask("scripted", Task(), play)


def test_more_episodes_than_slots_are_refused_until_one_ends():
    async def main():
        async with gateway(hang=True) as fake, serving(CALCULATOR, fake.url, slots=2) as client:
            for episode_id in ("1", "2"):
                assert (await client.post(client.body(episode_id, DATA)))[0] == 202
            status, body = await client.post(client.body("3", DATA))
            assert status == 429
            assert "2 slots" in body["error"]
            assert (await client.get("health"))[1]["free_slots"] == 0
            # One that is known is no new one.
            assert (await client.post(client.body("2", DATA)))[0] == 202
            await client.delete("1")
            await asyncio.sleep(0.05)
            assert (await client.post(client.body("3", DATA)))[0] == 202

    asyncio.run(main())


def test_a_play_that_ignores_its_cancellation_keeps_its_slot():
    released = asyncio.Event()

    async def play(task: Task, data: dict[str, Any], chat: Chat) -> Outcome:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return Outcome(0.0)

    async def main():
        async with serving(task_of(play), "http://127.0.0.1:1/v1", slots=1) as client:
            await client.post(client.body("1", {}))
            await client.delete("1")
            assert (await client.post(client.body("2", {})))[0] == 429
            released.set()
            await asyncio.sleep(0.05)
            assert (await client.post(client.body("2", {})))[0] == 202

    asyncio.run(main())


def test_the_same_post_again_is_the_same_episode_and_another_under_its_id_is_refused():
    async def main():
        async with gateway(policy=lambda messages: "=7") as fake, serving(CALCULATOR, fake.url) as client:
            first = await client.episode("1", DATA)
            status, again = await client.post(client.body("1", DATA))
            assert (status, again["reward"]) == (202, first.reward)
            assert len(fake.requests) == 1
            status, body = await client.post(client.body("1", {"expression": "1+1+1"}))
            assert status == 409
            assert "episode_id" in body["error"]

    asyncio.run(main())


def test_delete_stops_the_play_and_its_call_to_the_gateway_and_may_be_repeated():
    async def main():
        async with gateway(hang=True) as fake, serving(CALCULATOR, fake.url) as client:
            await client.post(client.body("1", DATA))
            waiting = asyncio.create_task(client.wait("1"))
            await until(lambda: fake.requests)
            assert await client.delete("1") == 204
            assert await client.delete("1") == 204
            assert (await waiting).state is EpisodeState.CANCELLED
            await until(lambda: fake.dropped == 1)
            assert (await client.get("episodes/1"))[0] == 404
            health = Health.model_validate((await client.get("health"))[1])
            assert (health.free_slots, health.ended) == (8, {EpisodeState.CANCELLED: 1})

    asyncio.run(main())


def test_a_long_poll_answers_when_its_time_is_up():
    async def main():
        async with gateway(hang=True) as fake, serving(CALCULATOR, fake.url) as client:
            await client.post(client.body("1", DATA))
            started = time.monotonic()
            _, body = await client.get("episodes/1?wait_s=0.3")
            assert body["state"] == "running"
            assert 0.25 < time.monotonic() - started < 2

    asyncio.run(main())


@pytest.mark.parametrize("wait_s", ["x", "-1", "nan"])
def test_a_bad_wait_is_refused(wait_s):
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            status, body = await client.get(f"episodes/1?wait_s={wait_s}")
            assert status == 422
            assert body["error"].startswith("wait_s")

    asyncio.run(main())


def test_an_episode_past_its_time_fails_with_the_turn_it_was_in():
    async def main():
        async with gateway(hang=True) as fake, serving(CALCULATOR, fake.url) as client:
            status = await client.episode("1", DATA, timeout_s=0.3)
            assert status.state is EpisodeState.FAILED
            assert status.reward is None
            await until(lambda: fake.dropped == 1)
            return status.error

    error = asyncio.run(main())
    assert "after 0.3 s, in turn 1" in error


def test_a_gateway_that_is_not_there_fails_the_episode_with_its_url():
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            return await client.episode("1", DATA)

    status = asyncio.run(main())
    assert status.state is EpisodeState.FAILED
    assert status.error.startswith("GatewayError: http://127.0.0.1:1/v1: ConnectionRefusedError: ")


def test_a_gateway_that_dies_in_an_episode_fails_it():
    async def main():
        async with mortal_gateway(hang=True) as (fake, kill), serving(CALCULATOR, fake.url) as client:
            await client.post(client.body("1", DATA))
            await until(lambda: fake.requests)
            await kill()
            return await client.wait("1")

    status = asyncio.run(main())
    assert status.state is EpisodeState.FAILED
    assert status.error.endswith("ServerDisconnectedError: Server disconnected")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"status": 503, "body": {"error": {"message": "engine is gone"}}}, "engine is gone"),
        ({"status": 400, "body": {"error": {"message": "bad role"}}}, "bad role"),
        ({"body": {"hello": 1}}, "no chat completion"),
        ({"body": "hello"}, "no chat completion"),
        ({"body": {"choices": [{"finish_reason": "stop", "message": {"content": None}}]}}, "no chat completion"),
    ],
)
def test_a_gateway_that_refuses_or_answers_garbage_fails_the_episode(settings, reason):
    async def main():
        async with gateway(**settings) as fake, serving(CALCULATOR, fake.url) as client:
            status = await client.episode("1", DATA)
            assert len(fake.requests) == 1  # no retry behind anyone's back
            return status

    status = asyncio.run(main())
    assert status.state is EpisodeState.FAILED
    assert reason in status.error
    assert "\n" not in status.error


def test_a_fault_in_a_play_is_its_episodes_reason_and_is_logged_once(caplog):
    async def play(task: Task, data: dict[str, Any], chat: Chat) -> Outcome:
        raise KeyError("no\nsuch key")

    async def main():
        async with serving(task_of(play), "http://127.0.0.1:1/v1") as client:
            statuses = [await client.episode(str(i), {}) for i in range(3)]
            return statuses, (await client.get("health"))[1]

    with caplog.at_level(logging.ERROR):
        statuses, health = asyncio.run(main())
    assert {status.state for status in statuses} == {EpisodeState.FAILED}
    assert statuses[0].error.startswith("KeyError: ")
    assert health["ended"] == {"failed": 3}
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: None, "must return an Outcome"), (lambda: Outcome(float("nan")), "reward is nan")],
)
def test_a_play_without_a_usable_outcome_fails(make, reason):
    async def play(task: Task, data: dict[str, Any], chat: Chat) -> Outcome:
        return make()

    async def main():
        async with serving(task_of(play), "http://127.0.0.1:1/v1") as client:
            return await client.episode("1", {})

    status = asyncio.run(main())
    assert status.state is EpisodeState.FAILED
    assert reason in status.error


def test_data_of_another_task_fails_the_episode_by_the_missing_key():
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            return await client.episode("1", {"digits": "3142"})

    assert "expression" in asyncio.run(main()).error


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"data": None}, "data"),
        ({"gateway_url": "localhost"}, "gateway_url"),
        ({"episode_id": "a/b"}, "episode_id"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_request_is_refused_by_the_fields_name(changes, field):
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            return await client.post(client.body("1", DATA) | changes)

    status, body = asyncio.run(main())
    assert status == 422
    assert body["error"].startswith(f"{field}: ")


def test_a_body_that_is_no_json_object_is_refused():
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            for raw in (b"{", b"[]", b"\xff"):
                async with client.http.post(f"{client.url}/episodes", data=raw) as response:
                    assert response.status == 422
                    assert (await response.json())["error"].startswith("body: ")

    asyncio.run(main())


def test_an_ended_episode_that_nobody_deletes_is_forgotten_after_its_time():
    async def main():
        async with gateway() as fake, serving(CALCULATOR, fake.url, retention_s=0.2) as client:
            await client.episode("1", DATA)
            assert (await client.get("episodes/1"))[0] == 200
            await asyncio.sleep(0.4)
            status, body = await client.get("episodes/1")
            assert status == 404
            assert "unknown" in body["error"]

    asyncio.run(main())


def test_metadata_names_the_task_and_the_protocol():
    async def main():
        async with serving(CALCULATOR, "http://127.0.0.1:1/v1") as client:
            return (await client.get("metadata"))[1]

    assert Metadata.model_validate(asyncio.run(main())) == Metadata(task="calculator")


def test_many_episodes_at_once_share_the_connections():
    async def main():
        async with gateway(policy=lambda messages: "=7") as fake, serving(CALCULATOR, fake.url, slots=64) as client:
            statuses = await asyncio.gather(*(client.episode(str(i), DATA) for i in range(64)))
            assert all(status.reward == 1.0 for status in statuses)
            assert (await client.get("health"))[1] == {
                "status": "ok",
                "slots": 64,
                "free_slots": 64,
                "ended": {"completed": 64},
            }

    asyncio.run(main())
