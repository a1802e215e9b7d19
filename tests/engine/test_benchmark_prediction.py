"""Comparing the planner with a run: points that the planner itself made are found again."""

import dataclasses

import pytest

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.pools import KvBytes, hisparse_pool, plain_tokens
from benchmarks.engine.prediction import Setting, compare, measured_crossover
from rollout.engine.throughput import Machine

MACHINE = Machine(hbm_bandwidth=3.9e12, host_bandwidth=5e10, step_overhead_s=1e-3, request_overhead_s=2e-5)
PROBE = {"section": "probe", "gpu_read_bytes_per_s": 3.9e12, "host_copy_bytes_per_s": 5e10}


@pytest.fixture
def setting_line():
    sizes, kv = ModelSizes(), KvBytes.of(512, 64, 128)
    pool = hisparse_pool(256, 27_648, 2048, 36_864, sizes.layers, kv)
    plain = plain_tokens(pool.gpu_bytes, sizes.layers, kv)
    return {"section": "setting", "model": sizes.hf_config(), "pool": dataclasses.asdict(pool), "plain_tokens": plain}


def point(setting, side, concurrency, locality=0.95):
    (made,) = setting.curve(side, 25_000.0, [concurrency], MACHINE, locality)
    return {
        "section": "steady",
        "side": side,
        "concurrency": concurrency,
        "locality_asked": locality,
        "context": 25_000.0,
        "running": made.running,
        "tokens_per_s": made.tokens_per_s,
        "step_ms": 1e3 * made.running / made.tokens_per_s,
        "observed": None,
    }


def test_planners_own_points_are_found_again(setting_line):
    setting = Setting.of(setting_line)
    points = [point(setting, "plain", n) for n in (8, 16, 32, 64, 128)]
    points += [point(setting, "hisparse", n) for n in (8, 16, 32, 64, 256)] + [point(setting, "hisparse", 256, 0.5)]
    *found, crossover, machine = compare([setting_line, PROBE, *points])
    assert machine["step_overhead_s"] == pytest.approx(MACHINE.step_overhead_s, rel=1e-3)
    assert machine["request_overhead_s"] == pytest.approx(MACHINE.request_overhead_s, rel=1e-3)
    assert len(found) == len(points)
    assert all(abs(line["error"]) < 1e-3 for line in found)
    assert crossover["measured"] == pytest.approx(crossover["predicted"], rel=0.2)


def test_observed_locality_counts_not_the_one_asked_for(setting_line):
    setting = Setting.of(setting_line)
    sparse = point(setting, "hisparse", 256, 0.8) | {"locality_asked": 0.95, "observed": {"locality": 0.8}}
    lines = [setting_line, PROBE, point(setting, "plain", 8), point(setting, "plain", 16), sparse]
    assert abs(compare(lines)[2]["error"]) < 1e-3


def test_a_run_without_a_probe_is_refused(setting_line):
    with pytest.raises(ValueError, match="a probe"):
        compare([setting_line])


def test_crossover_lies_where_the_lines_meet():
    def curve(*rates):
        return [
            {"concurrency": n, "running": n, "tokens_per_s": rate} for n, rate in zip((8, 32, 128), rates, strict=True)
        ]

    assert measured_crossover(curve(10, 20, 20), curve(5, 10, 30)) == pytest.approx(64, rel=0.01)
    assert measured_crossover(curve(10, 20, 20), curve(5, 10, 15)) is None
