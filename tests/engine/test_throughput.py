"""The predicted decode curves: limits that are known in closed form, and properties."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.capacity import Workload, predict_pools
from rollout.engine.config import EngineConfig
from rollout.engine.hisparse import HiSparseConfig
from rollout.engine.model_shape import model_shape
from rollout.engine.throughput import (
    Comparison,
    Machine,
    Point,
    StepCost,
    break_even,
    calibrate,
    decode_step,
    distinct_experts,
    expert_reads,
    misses,
    plateau,
    predict_curve,
)

GLM5 = model_shape(yaml.safe_load(Path("configs/model/glm5.yaml").read_text())["hf_config"])
LOAD = Workload(32_768, 8_192)
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def engine(sparse=True, **changes):
    values = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "context_length": 65_536}
    values |= {"tensor_parallel": 8, "data_parallel_attention": 8, "memory_fraction": 0.85, "prefix_cache": not sparse}
    values |= {"max_running_requests": 512, "hisparse": HiSparseConfig() if sparse else None}
    return EngineConfig(**(values | changes))


def curve(config, locality=0.95, machine=None, load=LOAD, free=139 * 10**9):
    pools = predict_pools(config, GLM5, free)
    return predict_curve(config, GLM5, pools, load, CONCURRENCIES, machine, locality)


def test_glm5_as_published():
    """GLM-5.1 in fp8, 32k in and 8k out, 8 x H200: without HiSparse flat from about 32 concurrent, with it much faster
    at 256 (of which 104 run in these pools), and slower where few requests run."""
    both = Comparison(curve(engine(sparse=False)), curve(engine()))
    flat = [point.concurrency for point in both.without if point.tokens_per_s == plateau(both.without)]
    assert flat[0] in (32, 64)
    assert both.gain > 1.8
    assert both.crossover in (32, 64)
    assert both.sparse[0].tokens_per_s < both.without[0].tokens_per_s


def test_the_curve_measured_on_an_h200_within_a_fifth():
    """4 layers, bf16, 20,000 tokens in and 1,024 out, SGLang 0.5.16; of a top-k drawn at random a share of k / L stays.

    The overheads are those of its two runs without HiSparse; the link's 55.5 GB/s were measured apart.
    """
    load, link = Workload(20_000, 1_024), Machine(host_bandwidth=55.5e9)
    small = replace(GLM5, layers=4, experts=None, mlp_width=4096, indexer=replace(GLM5.indexer, layers=4))
    one = {"tensor_parallel": 1, "data_parallel_attention": 1, "kv_dtype": "bfloat16"}
    machine = calibrate(engine(sparse=False, **one), small, load, {16: 6_844, 32: 12_418}, link)
    for running, rate in {16: 3_715, 32: 5_057, 64: 6_108, 128: 6_766, 256: 7_110}.items():
        step = decode_step(engine(**one), small, running, load, machine, locality=2048 / 20_512)
        assert running / step.total == pytest.approx(rate, rel=0.2), running


def test_calibration_finds_the_overheads_of_a_machine():
    config, truth = engine(sparse=False), Machine(step_overhead_s=2e-3, request_overhead_s=3e-5)
    measured = {n: n / decode_step(config, GLM5, n, LOAD, truth, 1.0).total for n in (8, 32, 128)}
    found = calibrate(config, GLM5, LOAD, measured, Machine())
    assert found.step_overhead_s == pytest.approx(2e-3)
    assert found.request_overhead_s == pytest.approx(3e-5)


def test_misses():
    assert misses(2048, 4096, 4096, 0.5) == 0  # all of it lies in the buffer
    assert misses(2048, 4096, 1000, 0.0) == 0  # attention is dense
    assert misses(2048, 2048, 10**9, 0.9) == pytest.approx(204.8)
    assert misses(2048, 4096, 6144, 0.0) == pytest.approx(2048 * 0.5)  # half of what is new lies among the other slots
    assert misses(2048, 4096, 50_000, 1.0) == 0


def test_a_step_bound_by_the_link():
    """Enough misses, and the step is their bytes over the link."""
    config = engine(max_running_requests=1024)
    slow = Machine(hbm_bandwidth=1e18, flops=1e21, host_bandwidth=1e9, step_overhead_s=0.0)
    step = decode_step(config, GLM5, 512, LOAD, slow, locality=0.0)
    missed = misses(2048, 4096, 32_768 + 4_096, 0.0)
    assert step.total == pytest.approx(64 * 78 * missed * 656 / 1e9, rel=1e-3)


def test_shared_indices_hide_transfers_behind_computation():
    shared = replace(GLM5, indexer=replace(GLM5.indexer, layers=20))
    step = decode_step(engine(), shared, 128, LOAD, Machine(), locality=0.5)
    alone = decode_step(engine(), GLM5, 128, LOAD, Machine(), locality=0.5)
    assert step.swap < alone.swap
    assert step.attention < alone.attention


def test_a_step_of_few_requests_reads_their_experts_alone():
    assert distinct_experts(256, 8, 1) == pytest.approx(8)
    assert distinct_experts(256, 8, 10_000) == pytest.approx(256)


def test_experts_are_read_as_often_as_their_tokens_fill_tiles():
    numbers = np.random.default_rng(0)
    for tokens, rows in ((48, 16), (128, 16), (256, 16), (512, 16), (512, 64)):
        counts = [
            np.bincount(np.concatenate([numbers.permutation(128)[:8] for _ in range(tokens)]), minlength=128)
            for _ in range(50)
        ]
        drawn = np.mean([np.ceil(count / rows).sum() for count in counts])
        assert expert_reads(128, 8, tokens, rows) == pytest.approx(drawn, rel=0.01)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 300), st.integers(1, 64))
def test_reads_lie_between_the_experts_touched_and_a_tile_a_token(routed, per_token, tokens, rows):
    per_token = min(per_token, routed)
    reads = expert_reads(routed, per_token, tokens, rows)
    distinct = distinct_experts(routed, per_token, tokens)
    assert distinct * (1 - 1e-9) <= reads <= (tokens * per_token) * (1 + 1e-9)
    assert expert_reads(routed, per_token, tokens, rows + 1) <= reads * (1 + 1e-9)
    assert expert_reads(routed, per_token, tokens, 1) == pytest.approx(tokens * per_token)


def test_small_tiles_cost_a_step_of_many_tokens():
    config = engine(sparse=False, max_running_requests=1024)
    small, by_itself = (
        decode_step(config, GLM5, 1024, LOAD, Machine(expert_tile_rows=rows), 1.0) for rows in (16, None)
    )
    few = [decode_step(config, GLM5, 16, LOAD, Machine(expert_tile_rows=rows), 1.0) for rows in (16, None)]
    assert small.weights > 1.5 * by_itself.weights
    assert few[0].weights == pytest.approx(few[1].weights, rel=1e-3)


def test_looking_up_the_hot_buffers_costs_every_layer():
    step = decode_step(engine(), GLM5, 8, LOAD, Machine(swap_overhead_s=1e-3), 1.0)
    assert step.swap == pytest.approx(78e-3)
    assert decode_step(engine(sparse=False), GLM5, 8, LOAD, Machine(swap_overhead_s=1e-3), 1.0).swap == 0


def test_break_even():
    assert break_even(lambda locality: 100 * locality, 30) == pytest.approx(0.3, abs=1e-3)
    assert break_even(lambda locality: 100 * locality, 101) is None
    assert break_even(lambda locality: 100 * locality + 50, 40) == 0


def test_prefill_takes_its_share():
    point, *_ = curve(engine(), machine=Machine(prefill_tokens_per_s=32_768.0))
    decoding, *_ = curve(engine())
    assert 1 / point.tokens_per_s == pytest.approx(1 / decoding.tokens_per_s + 1 / 8_192)


def test_crossover_is_where_it_stays_ahead():
    def points(rates):
        return [Point(n, n, rate, StepCost(0, 0, 0, 1)) for n, rate in enumerate(rates, 1)]

    assert Comparison(points([1, 1, 1, 1]), points([2, 0.5, 1, 2])).crossover == 3
    assert Comparison(points([1, 1]), points([2, 0.5])).crossover is None
    assert Comparison(points([1, 2]), points([1, 6])).gain == 3


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 512), st.integers(100, 60_000))
def test_more_locality_never_costs(less, more, running, prompt):
    less, more = min(less, more), max(less, more)
    config, load = engine(), Workload(prompt, 1_000)
    slower = decode_step(config, GLM5, running, load, Machine(), less)
    faster = decode_step(config, GLM5, running, load, Machine(), more)
    assert faster.total <= slower.total
    dense = decode_step(engine(sparse=False), GLM5, running, load, Machine(), 0.0)
    assert dense.total <= faster.total  # of as many requests: HiSparse wins by running more of them


@given(st.floats(0, 1), st.integers(1_000, 50_000), st.integers(130, 180))
def test_a_curve_never_runs_more_than_fit_nor_falls_when_it_is_full(locality, prompt, gigabytes):
    for config in (engine(), engine(sparse=False)):
        pools = predict_pools(config, GLM5, gigabytes * 10**9)
        load = Workload(prompt, 2_000)
        points = predict_curve(config, GLM5, pools, load, CONCURRENCIES, None, locality)
        most = pools.requests(load) * 8
        assert all(point.running == min(point.concurrency, most) for point in points)
        full = {point.tokens_per_s for point in points if point.concurrency >= most}
        assert len(full) <= 1
