"""Both tasks played over HTTP: task server, openai client, fake gateway."""

from __future__ import annotations

import asyncio

import pytest

from tasks.protocol import EpisodeEnd, EpisodeState
from tasks.registry import load_task
from tests.tasks.conftest import Messages, gateway, serving


def said(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def solver(messages: Messages) -> str:
    """Plays 3*4-5 rightly."""
    return {1: "[3*4]", 3: f"[{messages[-1]['content']}-5]", 5: f"={messages[-1]['content']}"}[len(messages)]


@pytest.mark.parametrize(
    ("policy", "reward", "end", "turns", "errors"),
    [
        (solver, 1.0, EpisodeEnd.STOP, 3, 0),
        (lambda messages: "=7", 1.0, EpisodeEnd.STOP, 1, 0),
        (lambda messages: "=8", 0.0, EpisodeEnd.STOP, 1, 0),
        (lambda messages: "=07", 0.0, EpisodeEnd.STOP, 1, 0),
        (lambda messages: "3*4" if len(messages) == 1 else "=7", 1.0, EpisodeEnd.STOP, 2, 1),
        (lambda messages: "[3*4]", 0.0, EpisodeEnd.MAX_TURNS, 4, 0),
        (lambda messages: "", 0.0, EpisodeEnd.MAX_TURNS, 4, 3),
    ],
    ids=["solves", "guesses", "wrong", "leading zero", "err then right", "too many calls", "says nothing"],
)
def test_calculator(policy, reward, end, turns, errors):
    async def main():
        async with gateway(policy=policy) as fake, serving(load_task("calculator", {}), fake.url) as client:
            status = await client.episode("1", {"expression": "3*4-5"})
            return status, fake.requests

    status, requests = asyncio.run(main())
    assert status.state is EpisodeState.COMPLETED
    assert (status.reward, status.end) == (reward, end)
    assert status.metrics == {"turns": turns, "tool_errors": errors}
    assert len(requests) == turns
    assert all(request["max_tokens"] == 16 for request in requests)


def test_calculators_conversation_grows_message_by_message():
    async def main():
        async with gateway(policy=solver) as fake, serving(load_task("calculator", {}), fake.url) as client:
            await client.episode("1", {"expression": "3*4-5"})
            return fake.requests

    last = asyncio.run(main())[-1]["messages"]
    assert said(last) == ["3*4-5", "[3*4]", "12", "[12-5]", "7"]
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "assistant", "tool"]


def test_a_turn_cut_by_the_token_limit_ends_the_episode_without_reward():
    async def main():
        async with gateway(policy=lambda messages: "=7", finish_reason="length") as fake:
            for name, data in (("calculator", {"expression": "3*4-5"}), ("sorting", {"digits": "3142"})):
                async with serving(load_task(name, {}), fake.url) as client:
                    status = await client.episode("1", data)
                    assert (status.reward, status.end) == (0.0, EpisodeEnd.LENGTH)

    asyncio.run(main())


def test_a_full_context_is_a_cut_turn_too():
    error = {"error": {"message": "too long", "code": "context_length_exceeded", "type": "invalid_request_error"}}

    async def main():
        async with gateway(status=400, body=error) as fake, serving(load_task("sorting", {}), fake.url) as client:
            return await client.episode("1", {"digits": "3142"})

    status = asyncio.run(main())
    assert (status.reward, status.end) == (0.0, EpisodeEnd.LENGTH)


@pytest.mark.parametrize(("answer", "reward"), [("1234", 1.0), ("1243", 0.0), ("123", 0.0), ("1234 ", 0.0)])
def test_sorting(answer, reward):
    async def main():
        async with gateway(policy=lambda messages: answer) as fake:
            async with serving(load_task("sorting", {}), fake.url) as client:
                status = await client.episode("1", {"digits": "3142"})
            return status, fake.requests

    status, requests = asyncio.run(main())
    assert (status.state, status.reward) == (EpisodeState.COMPLETED, reward)
    assert said(requests[0]["messages"]) == ["sort 3142"]
