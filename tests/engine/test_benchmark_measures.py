"""What the engine benchmark makes of times and tokens; pools of equal bytes; the whole benchmark on a CPU server."""

import asyncio
import json
import time

import pytest

from benchmarks.engine import __main__ as benchmark
from benchmarks.engine import report
from benchmarks.engine.agentic import summary
from benchmarks.engine.options import Memory, parse, schedule, together
from benchmarks.engine.pools import PAGE, KvBytes, hisparse_pool, plain_tokens
from benchmarks.engine.servers import cuda_spec, flags
from benchmarks.engine.streams import Stream, inter_token_latency, quantile, settled, throughput

KV = KvBytes.of(512, 64, 128)


def test_pools_take_equal_bytes_and_hold_the_requests():
    pool = hisparse_pool(256, 27_648, 2048, 36_864, 4, KV)
    assert pool.device_tokens >= 256 * (2048 + PAGE) + 2 * 27_648
    assert pool.host_tokens >= 256 * 27_648
    per_token = (KV.latent + KV.indexer) * 4
    plain = plain_tokens(pool.gpu_bytes, 4, KV)
    assert 0 <= pool.gpu_bytes - plain * per_token < PAGE * per_token
    assert plain // 27_648 < 60  # a fifth of the requests


def test_a_tokens_bytes_are_those_of_deepseek():
    assert (KV.latent, KV.indexer) == (1152, 132)


def test_flags_of_both_sides_differ_in_the_pool_and_hisparse_alone(tmp_path):
    pool = hisparse_pool(256, 27_648, 2048, 36_864, 4, KV)
    plain, sparse = (
        dict(cuda_spec(side, tmp_path, pool, 1_000_000, [8, 16]).arguments) for side in ("plain", "hisparse")
    )
    differ = {name for name in plain | sparse if plain.get(name) != sparse.get(name)}
    assert differ == {"max-total-tokens", "disable-radix-cache", "enable-hisparse", "hisparse-config"}
    line = flags(sparse)
    assert line[line.index("--cuda-graph-bs-decode") :][:3] == ["--cuda-graph-bs-decode", "8", "16"]


def stream(begin, *events, prompt=10):
    return Stream(begin, list(events), prompt_tokens=prompt)


def test_throughput_counts_the_windows_tokens_alone():
    decoding = stream(0.0, (1.0, 1), (2.0, 17), (3.0, 33))
    assert decoding.tokens_at(1.5) == 9
    assert throughput([decoding, stream(0.0, (2.5, 1))], 1.0, 2.0) == 16
    assert stream(0.0, (1.0, 1)).tokens_at(0.5) == 0  # its prompt was being read


def test_latency_counts_each_token_once():
    slow, fast = stream(0.0, (1.0, 1), (2.0, 2)), stream(0.0, (1.0, 1), (1.9, 10))
    assert inter_token_latency([slow, fast], 0.0, 3.0, 0.9) == pytest.approx(0.1)
    assert inter_token_latency([slow, fast], 0.0, 3.0, 0.95) == pytest.approx(1.0)
    assert inter_token_latency([slow], 1.5, 3.0, 0.9) is None


def test_quantile_is_a_value_that_occurs():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 9.0], 0.9, [9, 1]) == 1.0
    assert quantile([], 0.9) is None


def test_settled_takes_what_a_full_server_admits():
    async def decode(one):
        while True:
            one.events.append((time.monotonic(), len(one.events) + 1))
            await asyncio.sleep(0.01)

    async def run():
        streams = [Stream(0.0) for _ in range(3)]
        tasks = [asyncio.create_task(decode(one)) for one in streams[:2]]
        try:
            assert await settled(streams, 2, 10.0, 5.0) == 2
            return await settled(streams, 3, 0.2, 5.0)
        finally:
            for task in tasks:
                task.cancel()

    assert asyncio.run(run()) == 2


def test_a_failed_request_ends_the_section():
    failed = Stream(0.0, error="400: too long")
    with pytest.raises(RuntimeError, match="too long"):
        asyncio.run(settled([failed], 1, 1.0, 1.0))


def test_cached_share_is_by_tier_and_of_the_windows_prompts():
    inside, outside = stream(0.0, (1.0, 1), (1.5, 17), prompt=100), stream(0.0, (9.0, 1), prompt=900)
    inside.cached = {"device": 60, "host": 30}
    found = summary("hicache", 2, [inside, outside], 0.5, 2.5)
    assert found["cached_share"] == {"device": 0.6, "host": 0.3}
    assert (found["turns"], found["prompt_tokens_per_s"]) == (1, 50)


def test_gain_is_over_the_best_without_at_the_sweeps_locality():
    def point(side, rate, locality=0.95):
        return {"section": "steady", "side": side, "tokens_per_s": rate, "locality_asked": locality}

    lines = [point("plain", 4.0), point("plain", 5.0), point("hisparse", 2.0), point("hisparse", 16.0)]
    assert report.gain([*lines, point("hisparse", 7.0, 0.5)]) == 3.2
    assert report.gain(lines[:2]) is None


def test_cost_follows_the_price():
    line = report.with_cost({"tokens_per_s": 1000.0, "prompt_tokens_per_s": 3000.0}, 3.6)
    assert (line["usd_per_million_output"], line["usd_per_million_total"]) == pytest.approx((1.0, 0.25))


def test_schedule_has_what_was_asked_for(tmp_path):
    options = parse(["--json", str(tmp_path / "x"), "--device", "cuda", "--sections", "steady", "--sides", "hisparse"])
    names = [name for name, _ in schedule(options, [["hisparse"]], 50, cold=False)]
    assert [name.split(",")[0] for name in names] == [
        "checkpoint and localities",
        "start hisparse",
        "first requests",
        "steady",
    ]


@pytest.mark.parametrize(
    ("gpu_bytes", "groups"),
    [
        (30, [["plain", "hisparse", "hicache"]]),
        (45, [["plain", "hisparse"], ["hicache"]]),
        (60, [["plain"], ["hisparse"], ["hicache"]]),
        (200, [["plain"], ["hisparse"], ["hicache"]]),
    ],
)
def test_servers_that_fit_run_at_once(gpu_bytes, groups):
    assert together(["plain", "hisparse", "hicache"], Memory(gpu_bytes, 10), Memory(100, 50)) == groups


def test_servers_share_the_hosts_memory_too():
    assert together(["plain", "hisparse", "hicache"], Memory(1, 30), Memory(100, 50)) == [
        ["plain"],
        ["hisparse"],
        ["hicache"],
    ]


def test_unknown_sides_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--json", "x", "--sides", "plain,lmcache"])
    assert "lmcache" in capsys.readouterr().err


def test_benchmark_runs_against_a_cpu_server(tmp_path):
    lines = tmp_path / "lines.jsonl"
    arguments = ["--concurrency", "1,2", "--window", "2", "--agentic-window", "8", "--work", str(tmp_path)]
    assert benchmark.main(["--device", "cpu", "--json", str(lines), *arguments]) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    points = {(line["section"], line.get("concurrency")): line for line in found}
    assert {("steady", 1), ("steady", 2), ("agentic", 2)} <= points.keys()
    assert all(points[key]["tokens_per_s"] > 0 for key in points if key[0] in ("steady", "agentic"))
    assert points["steady", 2]["running"] == 2
    assert points["steady", 2]["ended"] == 0
    assert points["agentic", 2]["cached_share"]["device"] > 0.3  # the turns before
