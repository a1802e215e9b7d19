"""One generation put together from SGLang's events. The shapes are those that 0.5.23 was seen to send."""

import asyncio
import base64

import numpy as np
import pytest

from rollout.engine.protocol import EngineLost, FinishReason
from rollout.engine.sglang import receive
from rollout.engine.sglang_answers import GenerationStream, parse_prometheus


def event(tokens, total, reason=None, version=3, **meta):
    entries = [[-token / 10, token, None] for token in tokens]
    meta = {
        "finish_reason": reason and {"type": reason},
        "prompt_tokens": 4,
        "completion_tokens": total,
        "output_token_logprobs": entries,
        "weight_version": str(version),
    } | meta
    return {"output_ids": list(tokens), "meta_info": meta}


def waiting_abort(tokens, total):
    """SGLang tells all log-probs again, and the last token."""
    aborted = event(tokens, total, "abort")
    del aborted["meta_info"]["prompt_tokens"]
    return aborted | {"output_ids": list(tokens[-1:])}


def play(*events, **kwargs):
    stream = GenerationStream(4, **kwargs)
    for index, each in enumerate(events):
        stream.add(each, 0.1 * (index + 1))
    return stream


def test_events_add_up():
    generation = play(event([1], 1), event([2, 3], 3), event([4], 4, "stop", cached_tokens=2)).finish()
    assert generation.token_ids.tolist() == [1, 2, 3, 4]
    assert generation.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert generation.finish_reason is FinishReason.STOP
    assert generation.cached.hbm == 2
    assert generation.latency.first_token_s == pytest.approx(0.1)
    assert generation.latency.total_s == pytest.approx(0.3)


def test_what_came_before_the_server_died_is_an_aborted_generation():
    partial = play(event([1], 1), event([2, 3], 3)).partial
    assert partial.token_ids.tolist() == [1, 2, 3]
    assert partial.finish_reason is FinishReason.ABORT
    assert play().partial is None


@pytest.mark.parametrize(
    "end",
    [
        event([4, 5], 5, "abort"),  # while it ran
        waiting_abort([1, 2, 3, 4, 5], 5),  # while it waited after a retraction
        waiting_abort([4, 5, 1, 2, 3, 4, 5], 5),  # the same, with what had not been sent before
    ],
)
def test_an_aborted_request_has_each_token_once(end):
    generation = play(event([1], 1), event([2, 3], 3), end).finish()
    assert generation.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert generation.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])


def test_an_abort_that_reports_fewer_log_probs_than_were_received_takes_none_away():
    assert play(event([1], 1), event([2, 3], 3), waiting_abort([1, 2], 2)).finish().token_ids.tolist() == [1, 2, 3]


def test_versions_are_those_of_the_spans_and_else_those_of_the_events():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    said = play(event([1], 1), event([2, 3], 3, "length", version=4, weight_versions=spans)).finish()
    assert said.weight_versions.tolist() == [3, 3, 4]
    stamped = play(event([1], 1), event([2, 3], 3, "length", version=4)).finish()
    assert stamped.weight_versions.tolist() == [3, 4, 4]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event([1], 1), event([1, 2], 2)], "--incremental-streaming-output"),
        ([event([1], 1)], "without a finish_reason"),
        ([{"error": {"message": "longer than the context"}}], "longer than the context"),
        (
            [
                event([], 0, "abort")
                | {"meta_info": {"finish_reason": {"type": "abort", "status_code": 400, "message": "no"}}}
            ],
            "aborted by the server: no",
        ),
        ([event([1], 1) | {"output_ids": [2]}], "or for others"),
        ([event([1, 2], 2, "stop", weight_versions=[{"version": "1", "start": 0, "end": 1}])], "do not cover"),
    ],
)
def test_answers_of_another_shape_are_refused(events, says):
    with pytest.raises(ValueError, match=says):
        play(*events).finish()


def test_cached_tokens_and_the_likeliest_ones():
    tops = [[[-0.1, 7, None], [-2.0, 8, None]]]
    details = {"device": 5, "host": 6, "storage": 1}
    generation = play(event([7], 1, "stop", output_top_logprobs=tops, cached_tokens_details=details)).finish()
    assert (generation.cached.hbm, generation.cached.host, generation.cached.storage) == (5, 6, 1)
    assert generation.top_logprobs.token_ids.tolist() == [[7, 8]]
    assert generation.top_logprobs.logprobs == pytest.approx(np.array([[-0.1, -2.0]]))


def test_routed_experts_have_a_row_for_every_position_but_the_last():
    experts = np.arange(3 * 2 * 2, dtype=np.int32)
    encoded = base64.b64encode(experts.tobytes()).decode()
    done = event([1, 2], 2, "length", routed_experts=encoded)
    generation = play(done, experts_from=2, experts_shape=(2, 2)).finish()
    assert generation.routed_experts.tolist() == experts.reshape(3, 2, 2).tolist()  # positions 2, 3 and 4 of 6
    with pytest.raises(ValueError, match="12 routed experts for 4 positions of 2 layers with 2 experts"):
        play(done, experts_from=1, experts_shape=(2, 2)).finish()


def test_prometheus_samples_are_summed_over_their_labels():
    text = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{tp_rank="0"} 2.0
sglang:num_running_reqs{tp_rank="1"} 3.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1"} 4.0
sglang:time_to_first_token_seconds_bucket{le="+Inf"} 4.0
sglang:time_to_first_token_seconds_sum 0.5
sglang:time_to_first_token_seconds_count 4.0
# TYPE python_info gauge
python_info 1.0
"""
    assert parse_prometheus(text) == {
        "num_running_reqs": 5.0,
        "time_to_first_token_seconds_sum": 0.5,
        "time_to_first_token_seconds_count": 4.0,
    }


def test_an_event_that_cannot_be_read_closes_the_connection_at_once():
    closed = []

    async def events():
        try:
            yield event([1], 1)
            yield {"error": {"message": "too long"}}
            yield event([2], 2)
        finally:
            closed.append(True)

    async def run():
        with pytest.raises(ValueError, match="refused: too long"):
            await receive(events(), GenerationStream(4))
        return list(closed)

    assert asyncio.run(run()) == [True]


def failed_transfer(message):
    """As SGLang ends a request whose KV cache did not get from the prefill to the decode server."""
    ended = event([], 0, "abort")
    ended["meta_info"]["finish_reason"] |= {"message": message, "status_code": 500}
    return ended


def test_a_request_that_is_aborted_between_two_servers_is_aborted_like_others():
    message = "Decode transfer failed with exception KVTransferError(bootstrap_room=7): Aborted by AbortReq."
    generation = play(failed_transfer(message)).finish()
    assert generation.finish_reason is FinishReason.ABORT
    assert len(generation.token_ids) == 0


def test_a_kv_cache_that_is_lost_between_two_servers_is_a_lost_reply():
    message = (
        "Decode transfer failed with exception KVTransferError(bootstrap_room=7): Lost connection with prefill instance"
    )
    with pytest.raises(EngineLost, match="Lost connection with prefill"):
        play(failed_transfer(message))
