"""The gateway records exactly the ids that were sampled, refuses what can't be trained on, and resumes by prefix."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.fresh_model import character_tokenizer
from rollout.chat import ChatRenderer
from rollout.engine.protocol import FinishReason, Generation, TopLogprobs
from rollout.gateway import Gateway
from rollout.session import RolloutKey, Segment
from rollout.trajectory import NO_VERSION, StopReason
from tests.rollout.scripted import EOS, TOKENIZER, ScriptedEngines, renderer

KEY = RolloutKey("calculator", 0, "1+2", 5, 1)


@asynccontextmanager
async def gateway(engines, context_length=200, routed_experts=False, top_logprobs=0):
    served = Gateway(engines, renderer(), context_length, "policy", routed_experts, top_logprobs)
    await served.start("127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.stop()


def client(url):
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10)


def run(coroutine):
    return asyncio.run(coroutine)


def test_three_turns_are_one_trajectory_of_the_sampled_ids():
    replies = {1: "[3*4]", 2: "[12-5]", 3: "=7"}
    engines = ScriptedEngines(lambda prompt: replies[prompt.count("<assistant>")], version=3)

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, seed=9))
            messages = [{"role": "user", "content": "3*4-5"}]
            for tool in ("12", "7", None):
                answer = await chat.chat.completions.create(model="policy", messages=messages, max_tokens=16)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                if tool:
                    messages.append({"role": "tool", "content": tool, "tool_call_id": "x"})
            return await served.close("s"), answer

    record, answer = run(play())
    (t,) = record.trajectories(1.0, StopReason.STOP, {})
    text = "<user>3*4-5<assistant>[3*4]<eos><tool>12<assistant>[12-5]<eos><tool>7<assistant>=7<eos>"
    assert TOKENIZER.decode(t.token_ids) == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == len(t)
    acted = "".join(TOKENIZER.convert_ids_to_tokens(t.token_ids[t.action_mask].tolist()))
    assert acted == "[3*4]<eos>[12-5]<eos>=7<eos>"
    assert set(t.weight_versions[t.action_mask]) == {3}
    assert set(t.weight_versions[~t.action_mask]) == {NO_VERSION}
    assert t.rollout_logprobs[t.action_mask].tolist() == pytest.approx((-t.token_ids[t.action_mask] / 100).tolist())
    assert t.turn_index[t.action_mask].tolist() == [0] * 6 + [1] * 7 + [2] * 3
    assert (t.task, t.prompt_id, t.group_id, t.sample_id) == ("calculator", "1+2", 5, 1)
    assert engines.ended == ["s"]
    assert len({sampling.seed for _, sampling, _ in engines.calls}) == 3  # each turn has a seed of its own


def test_ids_are_kept_though_the_text_would_tokenise_otherwise():
    """A reply with a special token inside can't be rebuilt from its text; the record still has the sampled ids."""

    class Odd(ScriptedEngines):
        async def generate(self, token_ids, sampling, request_id, session):
            generation = await super().generate(token_ids, sampling, request_id, session)
            generation.token_ids[0] = TOKENIZER.convert_tokens_to_ids("<pad>")  # vanishes from the text
            return generation

    engines = Odd(lambda prompt: "x1")

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            messages = [{"role": "user", "content": "a"}]
            first = await chat.chat.completions.create(model="policy", messages=messages)
            assert first.choices[0].message.content == "1"
            messages += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "b"}]
            await chat.chat.completions.create(model="policy", messages=messages)
            return await served.close("s")

    (t,) = run(play()).trajectories(0.0, StopReason.STOP, {})
    assert TOKENIZER.decode(t.token_ids) == "<user>a<assistant><pad>1<eos><user>b<assistant><pad>1<eos>"


def test_an_aborted_reply_goes_on_from_its_prefix_with_both_versions():
    engines = ScriptedEngines(lambda prompt: "12345", version=0)
    engines.cut_first = 2

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            answer = await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            return answer, await served.close("s"), served.stats.resumptions

    answer, record, resumptions = run(play())
    (t,) = record.trajectories(0.0, StopReason.STOP, {})
    assert answer.choices[0].message.content == "12345"
    assert t.weight_versions[t.action_mask].tolist() == [0, 0, 1, 1, 1, 1]
    assert resumptions == 1


@pytest.mark.parametrize("received", [0, 2])
def test_a_reply_whose_engine_died_goes_on_elsewhere_from_what_was_received(received):
    engines = ScriptedEngines(lambda prompt: "12345")
    engines.die_after = [received, 1]

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            answer = await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            return answer, await served.close("s"), served.stats

    answer, record, stats = run(play())
    (t,) = record.trajectories(0.0, StopReason.STOP, {})
    assert answer.choices[0].message.content == "12345"
    assert TOKENIZER.decode(t.token_ids) == "<user>a<assistant>12345<eos>"
    assert t.rollout_logprobs[t.action_mask].tolist() == pytest.approx((-t.token_ids[t.action_mask] / 100).tolist())
    assert stats.lost == 2
    assert stats.sampled_tokens == 6


@pytest.mark.parametrize(("roles", "calls"), [(["both"], 5), (["prefill", "decode"], 9)])
def test_a_reply_that_kills_every_engine_is_given_up(roles, calls):
    """Of prefill and decode servers neither uses up what the other may lose."""
    engines = ScriptedEngines(lambda prompt: "12345")
    engines.die_after, engines.dying = [0] * 50, itertools.cycle(roles)

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            with pytest.raises(openai.InternalServerError, match="5 engines died of one reply"):
                await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            return await served.close("s")

    assert run(play()).segments == []
    assert len(engines.calls) == calls


def test_routed_experts_of_every_position_are_recorded_once():
    """Over two turns, of which the second is aborted and then loses its engine."""
    engines = ScriptedEngines(lambda prompt: "123" if prompt.count("<assistant>") == 1 else "4567")

    async def play():
        async with gateway(engines, routed_experts=True) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            messages = [{"role": "user", "content": "a"}]
            first = await chat.chat.completions.create(model="policy", messages=messages)
            engines.cut_first, engines.die_after = 1, []
            messages += [{"role": "assistant", "content": first.choices[0].message.content}]
            await chat.chat.completions.create(model="policy", messages=[*messages, {"role": "user", "content": "b"}])
            return await served.close("s")

    (t,) = run(play()).trajectories(0.0, StopReason.STOP, {})
    assert TOKENIZER.decode(t.token_ids) == "<user>a<assistant>123<eos><user>b<assistant>4567<eos>"
    assert t.routed_experts[:, 0, 0].tolist() == [*t.token_ids[:-1].tolist(), -1]


@pytest.mark.parametrize("top", [0, 3])
def test_the_likeliest_tokens_stand_at_the_sampled_ones(top):
    """Over two turns, of which the first is aborted and the second loses its engine; none where none are asked for."""
    engines = ScriptedEngines(lambda prompt: "123" if prompt.count("<assistant>") == 1 else "4567")

    async def play():
        async with gateway(engines, top_logprobs=top) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            messages = [{"role": "user", "content": "a"}]
            engines.cut_first = 1
            first = await chat.chat.completions.create(model="policy", messages=messages)
            engines.die_after = [1]
            messages += [{"role": "assistant", "content": first.choices[0].message.content}]
            await chat.chat.completions.create(model="policy", messages=[*messages, {"role": "user", "content": "b"}])
            return await served.close("s")

    (t,) = run(play()).trajectories(0.0, StopReason.STOP, {})
    assert TOKENIZER.decode(t.token_ids) == "<user>a<assistant>123<eos><user>b<assistant>4567<eos>"
    assert (engines.die_after, len(engines.calls)) == ([], 4)
    if not top:
        assert t.top_ids is None
        assert t.top_logprobs is None
        return
    sampled = t.action_mask
    assert t.top_ids[sampled].tolist() == [[token, token + 1, token + 2] for token in t.token_ids[sampled].tolist()]
    np.testing.assert_array_equal(t.top_logprobs[sampled][:, 0], t.rollout_logprobs[sampled])
    assert (t.top_ids[~sampled] == -1).all()
    assert (t.top_logprobs[~sampled] == 0).all()


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_rows_of_the_likeliest_are_those_of_the_sampled_tokens_or_it_is_an_error(turns):
    """Any contexts, replies of any pieces (a piece without tokens has none), some pieces of which lack them."""
    segment, wanted, lacking, number = Segment(), [], False, 10
    for context, pieces in turns:
        segment.append_context(range(context))
        wanted += [-1] * context
        generations = []
        for length, recorded in pieces:
            ids = np.arange(number, number + length, dtype=np.int32)
            number += length
            wanted += ids.tolist()
            top = TopLogprobs(ids[:, None], np.zeros((length, 1), np.float32)) if recorded and length else None
            lacking |= not recorded and length > 0
            generations.append(
                Generation(
                    ids, -ids.astype(np.float32), np.zeros(length, np.int32), FinishReason.STOP, 1, top_logprobs=top
                )
            )
        segment.append_reply(generations, {"role": "assistant", "content": ""})
    if lacking and segment.top:
        with pytest.raises(ValueError, match=r"likeliest tokens of \d+ positions were recorded"):
            segment.top_logprobs()
    elif segment.top:
        assert segment.top_logprobs().token_ids[:, 0].tolist() == wanted
    else:
        assert segment.top_logprobs() is None


def test_prometheus_gets_the_gateways_and_the_engines_figures():
    async def play():
        async with gateway(ScriptedEngines(lambda prompt: "ok")) as served, aiohttp.ClientSession() as http:
            url = served.open("s", KEY, 1.0, None)
            await client(url).chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            async with http.get(url.partition("/sessions")[0] + "/metrics") as response:
                return await response.text(), served.telemetry.latencies(), served.telemetry.latencies()

    text, latencies, none = run(play())
    for line in (
        "atelier_turns_total 1.0",
        "atelier_sampled_tokens_total 3.0",
        "atelier_cached_host_tokens_total 2.0",
        "atelier_time_to_first_token_seconds_count 1.0",
        'atelier_engine_running{engine="engine-0"} 3.0',
        'atelier_engine_restarts{engine="engine-0"} 2.0',
        'atelier_engine_serving{engine="engine-0",phase="serving"} 1.0',
    ):
        assert line in text
    assert latencies == {"ttft_mean": 0.25, "ttft_p90": 0.25, "inter_token_mean": 0.125, "inter_token_p90": 0.125}
    assert none == {}


def test_a_rewritten_conversation_and_a_fork_begin_segments():
    engines = ScriptedEngines(lambda prompt: "ok")

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ok"}]
            for messages in (
                long[:1],
                [*long, {"role": "user", "content": "b"}],
                [{"role": "user", "content": "short"}],
                [*long, {"role": "user", "content": "c"}],
            ):
                await chat.chat.completions.create(model="policy", messages=messages)
            return await served.close("s")

    first, second, third = run(play()).trajectories(1.0, StopReason.STOP, {})
    assert TOKENIZER.decode(first.token_ids) == "<user>a<assistant>ok<eos><user>b<assistant>ok<eos>"
    assert TOKENIZER.decode(second.token_ids) == "<user>short<assistant>ok<eos>"
    assert TOKENIZER.decode(third.token_ids) == "<user>a<assistant>ok<eos><user>c<assistant>ok<eos>"
    assert third.action_mask.sum() == 3  # the reply that was sampled before the fork is trained in its own segment
    assert [t.segment for t in (first, second, third)] == [0, 1, 2]


REASONING_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<' + message.role + '>' }}"
    "{%- if message.role == 'assistant' and loop.last -%}{{ '[think]' }}{%- endif -%}"
    "{{ message.content }}"
    "{%- if message.role == 'assistant' -%}{{ '<eos> ' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)


def test_a_template_that_renders_the_last_reply_another_way_keeps_one_segment():
    """As Qwen3's does, which leaves reasoning out of all but the last reply."""
    tokenizer = character_tokenizer(256)
    tokenizer.chat_template = REASONING_TEMPLATE
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "12"}]
    observation = ChatRenderer(tokenizer).observation(history, [{"role": "tool", "content": "b"}], stopped=True)
    assert tokenizer.decode(observation) == " <tool>b<assistant>"


def test_a_client_that_gives_up_leaves_no_turn_behind():
    engines = ScriptedEngines(lambda prompt: "ok", delay_s=0.4)

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None)).with_options(timeout=0.1)
            with pytest.raises(openai.APITimeoutError):
                await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            await asyncio.sleep(0.6)
            return await served.close("s")

    assert run(play()).segments == []
    assert engines.aborted == ["s.0.0"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 0.3}, "temperature=0.3: this run samples at 1.0"),
        ({"top_p": 0.9}, "top_p=0.9: only top_p=1"),
        ({"n": 2}, "n=2"),
        ({"extra_body": {"top_k": 5}}, "top_k: Extra inputs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the context holds 200"),
    ],
)
def test_requests_that_can_not_be_trained_on_are_refused_by_name(changes, says):
    async def play():
        async with gateway(ScriptedEngines(lambda prompt: "ok")) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            request = {"model": "policy", "messages": [{"role": "user", "content": "a"}]} | changes
            with pytest.raises(openai.BadRequestError) as error:
                await chat.chat.completions.create(**request)
            return str(error.value)

    assert says in run(play())


def test_the_context_bounds_a_reply_and_the_client_learns_of_it():
    async def play():
        async with gateway(ScriptedEngines(lambda prompt: "1" * 50), context_length=20) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            return await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "abc"}])

    answer = run(play())
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 20


def test_a_dead_engine_is_a_502_and_nothing_is_recorded():
    engines = ScriptedEngines(lambda prompt: "ok")
    engines.broken = True

    async def play():
        async with gateway(engines) as served:
            chat = client(served.open("s", KEY, 1.0, None))
            with pytest.raises(openai.InternalServerError, match="engine died"):
                await chat.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
            return await served.close("s")

    assert run(play()).segments == []


def test_closing_a_session_aborts_what_it_has_in_flight_and_later_requests_get_404():
    engines = ScriptedEngines(lambda prompt: "ok", delay_s=0.3)

    async def play():
        async with gateway(engines) as served:
            url = served.open("s", KEY, 1.0, None)
            request = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
            pending = asyncio.create_task(client(url).chat.completions.create(**request))
            await asyncio.sleep(0.1)
            await served.close("s")
            with pytest.raises(openai.NotFoundError):
                await pending
            with pytest.raises(openai.NotFoundError):
                await client(url).chat.completions.create(**request)

    run(play())
    assert engines.aborted == ["s.0.0"]


TEXT = st.text(st.sampled_from("0123456789+-*=[] abc"), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_observations_turn_by_turn_are_the_rendered_conversation(turns):
    """Where the model's text tokenises back to its ids, the record equals tokenising the whole conversation."""
    r: ChatRenderer = renderer()
    messages, ids = [], []
    for user, reply in turns:
        new = [{"role": "user", "content": user}]
        ids += r.observation(messages, new, stopped=True) if messages else r.prompt(new)
        ids += [*TOKENIZER.encode(reply, add_special_tokens=False), EOS]
        messages += [*new, {"role": "assistant", "content": reply}]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == whole
    assert r.conversation(messages)[0] == whole


def test_a_reply_cut_by_a_limit_is_closed_by_the_template():
    r = renderer()
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "12"}]
    new = [{"role": "user", "content": "b"}]
    assert TOKENIZER.decode(r.observation(history, new, stopped=False)) == "<eos><user>b<assistant>"
