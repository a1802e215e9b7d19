"""Prefill and decode on servers apart: a request reaches both, and names where they meet.

What happens when one of several fails is tested with servers that answer like SGLang, the rest with two real ones on
the CPU that send the KV cache over TCP (``make test-pd`` installs what they need; skipped where it is missing).
"""

import asyncio
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.weights.publisher import publish
from rl.weights.transports import DiskTransport
from rollout.engine import launcher as launcher_module
from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig, RoleConfig, transfer_problem
from rollout.engine.fleet import EngineFleet
from rollout.engine.launch import server_specs
from rollout.engine.pd import ROOMS, Half, Rendezvous, generate_apart, hand_over, pairs, rendezvous
from rollout.engine.protocol import EngineError, EngineLost, FinishReason, Generation, Sampling
from rollout.engine.recovery import RecoveryConfig
from rollout.engine.routing import Routes
from rollout.engine.server import Server
from rollout.engine.sglang import SGLangEngine
from rollout.engine.supervisor import Supervisor
from rollout.processes import ProcessError, ProcessRegistry, free_port
from tests.engine.conftest import CONTEXT_LENGTH, received, until, until_received, until_running, until_streaming
from tests.trainer.models import MODELS, save_model

FAKE = Path(__file__).with_name("fake_server.py")
BOOTSTRAP = 12_500
"""Of servers that send nothing; the next is taken, too. No port that ``free_port`` gives to others."""
GREEDY = Sampling(temperature=0.0, max_new_tokens=24)
LONG = Sampling(temperature=0.0, max_new_tokens=CONTEXT_LENGTH - 16)


def generation(*token_ids: int, reason: FinishReason = FinishReason.LENGTH) -> Generation:
    ids = np.array(token_ids, np.int32)
    return Generation(ids, np.zeros(len(ids), np.float32), ids * 0, reason, 1)


async def after(seconds: float, outcome: Generation | EngineError) -> Generation:
    await asyncio.sleep(seconds)
    if isinstance(outcome, EngineError):
        raise outcome
    return outcome


def test_a_rendezvous_is_at_the_prefill_servers_machine_in_a_room_of_its_own():
    rng = random.Random(0)
    first, second = (rendezvous("http://10.1.2.3:30000", 8998, rng) for _ in range(2))
    assert first.fields() == {"bootstrap_host": "10.1.2.3", "bootstrap_port": 8998, "bootstrap_room": first.room}
    assert first.room != second.room
    assert 0 <= first.room < ROOMS


def test_pairs_hold_every_server():
    assert pairs([0, 1], [2, 3, 4]) == [(0, 2), (1, 3), (0, 4)]
    assert pairs([0, 1, 2], [3]) == [(0, 3), (1, 3), (2, 3)]
    assert pairs([], [0, 1]) == []


NEVER = 3600.0


@pytest.mark.parametrize(
    ("prefill", "decode", "tokens"),
    [
        ((0.0, generation(5)), (0.02, generation(5, 6)), [5, 6]),
        ((0.02, generation(5)), (0.0, generation(5, 6)), [5, 6]),
        ((NEVER, generation(5)), (0.0, generation(5, reason=FinishReason.ABORT)), [5]),
        ((0.0, generation(reason=FinishReason.ABORT)), (NEVER, generation(5, 6)), []),
    ],
    ids=["prefill answers first", "decode answers first", "decode aborted", "prefill aborted"],
)
def test_the_decode_servers_answer_counts_and_an_aborted_half_ends_the_other(prefill, decode, tokens):
    answer = asyncio.run(asyncio.wait_for(generate_apart(after(*prefill), after(*decode)), 10))
    assert answer.token_ids.tolist() == tokens


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_half_that_fails_ends_the_other(fails_first):
    fails, waits = after(0.0, EngineLost("gone")), after(NEVER, generation(5))
    halves = (fails, waits) if fails_first else (waits, fails)
    with pytest.raises(EngineLost, match="gone"):
        asyncio.run(asyncio.wait_for(generate_apart(*halves), 10))


@dataclass
class Answers:
    """In place of a server: says one thing after another, each to a room of its own."""

    outcomes: list[Generation | EngineError]
    rooms: list[int] = field(default_factory=list)

    async def generate(self, prompt, sampling, request_id, meeting) -> Generation:
        self.rooms.append(meeting["bootstrap_room"])
        return await after(0.0, self.outcomes.pop(0))


def handed_over(*decoded: Generation | EngineError) -> list[int]:
    """Rooms that a decode server was sent to until it had taken a prompt over."""
    prefill, decode = Answers([generation(5)] * len(decoded)), Answers(list(decoded))
    rooms = (Rendezvous("here", 1, room) for room in range(len(decoded)))
    halves = (Half("prefill-0", prefill, "p.log"), Half("decode-1", decode, "d.log"))
    asyncio.run(hand_over(*halves, lambda: next(rooms), 10))
    assert prefill.rooms == decode.rooms
    return decode.rooms


def test_a_publication_that_aborts_the_first_request_of_a_pair_proves_nothing():
    aborted = generation(reason=FinishReason.ABORT)
    assert handed_over(generation(5, 6)) == [0]
    assert handed_over(aborted, aborted, generation(5, 6)) == [0, 1, 2]
    with pytest.raises(EngineError, match=r"prefill-0 could not .* to decode-1: gone; see p.log and d.log"):
        handed_over(aborted, EngineLost("gone"))


def test_a_publication_has_prefixes_forgotten_of_servers_that_prefill_too(tmp_path):
    apart = DisaggregationConfig(prefill=RoleConfig(servers=2), decode=RoleConfig(servers=2))
    config = EngineConfig(context_length=CONTEXT_LENGTH, disaggregation=apart)
    routes, prompt = Routes(generating=[2, 3], prefill=[0, 1]), list(range(256))
    with ProcessRegistry() as registry:
        launcher = launcher_module.LocalLauncher(config, registry, tmp_path)
        servers = [Server(spec, config, launcher, print, (0, 0)) for spec in server_specs(config)]
        supervisor = Supervisor(config, servers, routes, registry, tmp_path, print)
        assert routes.pick("first", prompt) == (2, 0)
        assert routes.pick("the same prompt", prompt) == (2, 0)
        supervisor.publish_begun()
        supervisor.publish_ended(supervisor.version + 1)
        assert routes.pick("after it", prompt) == (3, 1)


def test_the_experts_of_the_prompt_are_the_prefill_servers():
    def routed(experts: list[int]) -> Generation:
        return replace(generation(5, 6), routed_experts=np.array(experts, np.int32).reshape(-1, 1, 1))

    prefilled, decoded = routed([1, 2, 3]), routed([90, 91, 92, 4, 5])
    answer = asyncio.run(generate_apart(after(0.02, prefilled), after(0.0, decoded)))
    assert answer.routed_experts.ravel().tolist() == [1, 2, 3, 4, 5]
    lost = asyncio.run(generate_apart(after(0.02, EngineLost("gone")), after(0.0, decoded)))
    assert lost.routed_experts is None


def test_what_is_missing_is_said_before_anything_starts(tmp_path):
    def start(registry: ProcessRegistry, roles: DisaggregationConfig) -> None:
        config = EngineConfig(context_length=128, disaggregation=roles)
        asyncio.run(EngineFleet(config, registry, tmp_path, print).start(Path("unused")))

    with ProcessRegistry() as registry:
        if (problem := transfer_problem("mori")) is not None:
            with pytest.raises(ProcessError, match=r"engine\.disaggregation\.transfer_backend=mori needs .* amd-mori"):
                start(registry, DisaggregationConfig(transfer_backend="mori", bootstrap_port=free_port()))
            assert "importing mori.io says: " in problem
        port = free_port()
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ProcessError, match=rf"disaggregation.bootstrap_port\): port {port} .* is taken"),
        ):
            start(registry, DisaggregationConfig(bootstrap_port=port))


@pytest.fixture
def make_apart(monkeypatch, tmp_path):
    """Two prefill servers and a decode server."""

    def command(config, model_dir, port, weight_version, index):
        return [sys.executable, str(FAKE), str(port), "serves", str(weight_version)]

    monkeypatch.setattr(launcher_module, "command", command)
    monkeypatch.setattr(launcher_module, "transfer_problem", lambda backend: None)  # they send nothing
    roles = DisaggregationConfig(prefill=RoleConfig(servers=2), decode=RoleConfig(servers=1), bootstrap_port=BOOTSTRAP)

    def make(**recovery: float) -> EngineFleet:
        settings = RecoveryConfig(**({"backoff_s": 0.1} | recovery))
        config = EngineConfig(context_length=128, disaggregation=roles, recovery=settings)
        return EngineFleet(config, registry, tmp_path, print)

    with ProcessRegistry() as registry:
        yield make


@pytest.fixture
def apart(make_apart):
    return make_apart()


def test_both_servers_get_the_request_and_the_same_room(apart):
    async def run():
        await apart.start(Path("unused"))
        try:
            for index in range(4):
                answer = await apart.generate([index], Sampling(1.0, 2), f"r{index}", session=f"s{index}")
                assert answer.token_ids.tolist() == [index + 1, index + 2]
            return {name: await received(process) for name, process in apart.processes.items()}
        finally:
            await apart.stop()

    requests = asyncio.run(run())
    assert set(requests) == {"prefill-0", "prefill-1", "decode-2"}
    # The first of each prefill server is the start's, which has every server hand over once.
    assert [len(requests[name]) for name in ("prefill-0", "prefill-1", "decode-2")] == [3, 3, 6]
    decoded = {body["bootstrap_room"]: body for body in requests["decode-2"]}
    for rank in range(2):
        for body in requests[f"prefill-{rank}"]:
            partner = decoded[body["bootstrap_room"]]
            assert body["bootstrap_port"] == partner["bootstrap_port"] == BOOTSTRAP + rank
            assert body["bootstrap_host"] == partner["bootstrap_host"] == "127.0.0.1"
            assert body["input_ids"] == partner["input_ids"]


def test_a_prefill_server_that_dies_ends_the_request_so_that_it_can_go_to_the_other(apart):
    async def run():
        await apart.start(Path("unused"))
        try:
            in_flight = asyncio.create_task(apart.generate([1], Sampling(1.0, 9000), "r", session="s"))
            await until_received(apart.processes["decode-2"], "r")
            os.kill(apart.processes["prefill-0"].pid, signal.SIGKILL)
            with pytest.raises(EngineLost) as lost:
                await asyncio.wait_for(in_flight, 60)
            assert lost.value.role == "prefill"
            return await apart.generate([1], Sampling(1.0, 1), "r2", session="s")
        finally:
            await apart.stop()

    assert asyncio.run(run()).token_ids.tolist() == [2]


def test_a_request_goes_to_two_servers_that_serve_at_the_same_time(apart):
    """It waits for a prefill server, and meanwhile the only decode server dies."""

    async def run():
        await apart.start(Path("unused"))
        try:
            prefill = [process for name, process in apart.processes.items() if name.startswith("prefill")]
            for process in prefill:
                os.kill(process.pid, signal.SIGKILL)

            async def noticed():
                return len(apart.lost) == len(prefill)

            await until(noticed, 60)
            waiting = asyncio.create_task(apart.generate([1], Sampling(1.0, 1), "r", session="s"))
            await asyncio.sleep(0)
            os.kill(apart.processes["decode-2"].pid, signal.SIGKILL)
            return await asyncio.wait_for(waiting, 120)
        finally:
            await apart.stop()

    assert asyncio.run(run()).token_ids.tolist() == [2]


def test_without_any_prefill_server_a_request_fails_at_once(make_apart):
    """The decode server that is left cannot generate alone."""

    async def run():
        fleet = make_apart(max_restarts=0)
        await fleet.start(Path("unused"))
        try:
            for name in ("prefill-0", "prefill-1"):
                os.kill(fleet.processes[name].pid, signal.SIGKILL)

            async def given_up():
                return len(fleet.lost) == 2

            await until(given_up, 60)
            with pytest.raises(EngineError, match=r"no inference server is left.*prefill-0.*SIGKILL"):
                await asyncio.wait_for(fleet.generate([1], Sampling(1.0, 1), "r", session="s"), 60)
        finally:
            await fleet.stop()

    asyncio.run(run())


# Real servers


@dataclass
class Pair:
    """A real prefill server and a real decode server, and the event loop that watches them."""

    fleet: EngineFleet
    loop: asyncio.AbstractEventLoop
    model_dir: Path
    requests: int = 0

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 240.0) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self.loop).result()

    async def generate(self, prompt: list[int], sampling: Sampling, session: str = "") -> Generation:
        self.requests += 1
        return await self.fleet.generate(prompt, sampling, f"r{self.requests}", session or f"s{self.requests}")

    async def load(self, engine: SGLangEngine) -> None:
        """What a server that was started again gets (``CurrentWeights``)."""
        await engine.update_weights_from_disk(str(self.model_dir), self.fleet.weight_version)


@pytest.fixture(scope="module")
def over_tcp():
    """How a real pair is wired."""
    if (problem := transfer_problem("mooncake_tcp")) is not None:
        pytest.skip(problem)
    return DisaggregationConfig(transfer_backend="mooncake_tcp", bootstrap_port=free_port())


@pytest.fixture(scope="module")
def pair(models, over_tcp, tmp_path_factory):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = EngineConfig(
        context_length=CONTEXT_LENGTH,
        max_running_requests=16,
        max_total_tokens=8192,
        disaggregation=over_tcp,
        recovery=RecoveryConfig(backoff_s=0.1),
    )
    with ProcessRegistry() as registry:
        fleet = EngineFleet(config, registry, tmp_path_factory.mktemp("pair"), print)
        made = fleet.current = Pair(fleet, loop, models[0].directory)
        made.run(made.fleet.start(models[0].directory), config.start_timeout_s)
        yield made
        made.run(made.fleet.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def agree(model, prompt: list[int], answer: Generation) -> None:
    """The log-probs are what the model itself says of these tokens."""
    expected = model.logprobs([*prompt, *answer.token_ids.tolist()])[len(prompt) :]
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


@pytest.mark.timeout(600)
def test_two_servers_apart_generate_what_one_does(pair, server, models):
    prompts = [[2, *range(10 + index, 11 + 7 * index)] for index in range(12)]

    async def one() -> list[Generation]:
        async with server.engine() as engine:
            sent = (engine.generate(prompt, GREEDY, f"one{index}") for index, prompt in enumerate(prompts))
            return await asyncio.gather(*sent)

    async def two() -> list[Generation]:
        return await asyncio.gather(*(pair.generate(prompt, GREEDY) for prompt in prompts))

    for prompt, single, both in zip(prompts, asyncio.run(one()), pair.run(two()), strict=True):
        assert both.token_ids.tolist() == single.token_ids.tolist()
        assert both.finish_reason is single.finish_reason
        np.testing.assert_allclose(both.logprobs, single.logprobs, atol=1e-4)
        agree(models[0], prompt, both)


def test_the_prefill_server_keeps_the_prefixes_of_a_session(pair, models):
    prompt = [2, *range(40, 90)]
    first = pair.run(pair.generate(prompt, GREEDY, "turns"))
    later = [*prompt, *first.token_ids.tolist(), 33, 34]
    second = pair.run(pair.generate(later, GREEDY, "turns"))
    assert second.cached.hbm >= len(prompt)
    agree(models[0], later, second)


def test_a_sequence_is_scored_by_the_prefill_server_alone(pair, models):
    async def run() -> list[np.ndarray]:
        scored = await asyncio.gather(*(pair.fleet.score([2, *range(30, 40 + index)]) for index in range(3)))
        for engine in pair.fleet.engines:
            await engine.until_idle()
        return scored

    for index, found in enumerate(pair.run(run())):
        expected = models[0].logprobs([2, *range(30, 40 + index)])
        np.testing.assert_allclose(found[1:], expected[1:], atol=1e-4)


def test_an_aborted_reply_returns_what_it_had_and_leaves_both_servers_idle(pair, models):
    async def run() -> Generation:
        reply = asyncio.create_task(pair.fleet.generate([2, 9, 9], LONG, "to end", "s"))
        await until_running(pair.fleet.engines[1], 1)
        await pair.fleet.abort(["to end"])
        answer = await reply
        for engine in pair.fleet.engines:
            await engine.until_idle()
        return answer

    answer = pair.run(run())
    assert answer.finish_reason is FinishReason.ABORT
    agree(models[0], [2, 9, 9], answer)


def test_published_weights_reach_both_and_no_reply_is_of_two_versions(pair, server, models):
    """A prefill server can't take back what it has computed of a prompt, so replies in flight are aborted: those that
    are decoded, those that wait for a place on the one server or the other, and those between the two, of which a few
    are lost (whoever sent them sends them again, as after an abort)."""
    prompts = [[2, 30 + index, 51] for index in range(48)]

    async def run() -> tuple[list[Generation | BaseException], list[Generation]]:
        await asyncio.gather(*(engine.abilities() for engine in pair.fleet.engines))  # seconds, once
        replies = [asyncio.create_task(pair.generate(prompt, LONG)) for prompt in prompts]
        await until_running(pair.fleet.engines[1], 8)
        async with pair.fleet.publication() as publication:
            transport = DiskTransport(models[1].directory)
            await publish(publication.engines, transport, 1, server.shapes())
            publication.holds = 1
        before = await asyncio.gather(*replies, return_exceptions=True)
        after = await asyncio.gather(*(pair.generate(prompt, GREEDY) for prompt in prompts))
        async with pair.fleet.publication() as publication:
            await publish(publication.engines, DiskTransport(models[0].directory), 2, server.shapes())
            publication.holds = 2
        return before, after

    before, after = pair.run(run())
    aborted = [(prompt, old) for prompt, old in zip(prompts, before, strict=True) if isinstance(old, Generation)]
    assert {len(old.token_ids) > 1 for _, old in aborted} == {True, False}
    assert all(isinstance(old, Generation | EngineLost) for old in before)
    for prompt, old in aborted:
        assert old.finish_reason is FinishReason.ABORT
        assert set(old.weight_versions.tolist()) <= {0}
        agree(models[0], prompt, old)
    for prompt, new in zip(prompts, after, strict=True):
        assert set(new.weight_versions.tolist()) == {1}
        agree(models[1], prompt, new)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["decode-1", "prefill-0"])
def test_a_killed_half_comes_back_and_the_pair_goes_on(pair, models, victim):
    """What a killed decode server had is lost up to the last event; a killed prefill server takes nothing along that
    the decode server has already got."""
    prompts = [[2, 60 + index, 61] for index in range(4)]

    async def run() -> tuple[list[Generation | BaseException], Generation]:
        replies = [asyncio.create_task(pair.generate(prompt, LONG)) for prompt in prompts]
        await until_streaming(pair.fleet.engines[1], prompts)
        os.kill(pair.fleet.processes[victim].pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*replies, return_exceptions=True)
        while victim not in pair.fleet.lost:  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.05)
        return outcomes, await pair.generate([2, 70, 71], GREEDY)  # waits for the server that starts again

    outcomes, later = pair.run(run(), 600)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if victim.startswith("decode"):
            assert isinstance(outcome, EngineLost)
            assert outcome.partial is not None
            agree(models[0], prompt, outcome.partial)
        else:
            assert isinstance(outcome, Generation)
            assert len(outcome.token_ids) == LONG.max_new_tokens
            agree(models[0], prompt, outcome)
    agree(models[0], [2, 70, 71], later)
    assert set(later.weight_versions.tolist()) == {pair.fleet.weight_version}
    assert pair.fleet.lost == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_experts_of_a_pair_are_those_of_one_server(over_tcp, tmp_path):
    """Also where the second turn's prompt is cached on the prefill server."""
    save_model("qwen3_moe", tmp_path / "model")
    shape = MODELS["qwen3_moe"][1]
    both = over_tcp.model_copy(update={"bootstrap_port": free_port()})

    async def play(registry: ProcessRegistry, roles: DisaggregationConfig | None) -> list[Generation]:
        config = EngineConfig(
            context_length=CONTEXT_LENGTH, max_total_tokens=4096, routed_experts=True, disaggregation=roles
        )
        sizes = (shape.num_hidden_layers, shape.num_experts_per_tok)
        fleet = EngineFleet(config, registry, tmp_path / str(roles is None), print, experts_shape=sizes)
        await fleet.start(tmp_path / "model")
        try:
            prompt = [2, *range(30, 60)]
            first = await fleet.generate(prompt, replace(GREEDY, routed_experts_from=0), "first", "s")
            later = [*prompt, *first.token_ids.tolist(), 20, 21]
            return [first, await fleet.generate(later, replace(GREEDY, routed_experts_from=5), "later", "s")]
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:

        async def run() -> list[list[Generation]]:
            return await asyncio.gather(play(registry, both), play(registry, None))

        apart, together = asyncio.run(run())
    for pair, single in zip(apart, together, strict=True):
        assert pair.token_ids.tolist() == single.token_ids.tolist()
        np.testing.assert_array_equal(pair.routed_experts, single.routed_experts)
