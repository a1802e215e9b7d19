"""Comparing the planner with runs: points that it made itself are found again, and those of an H200 are predicted."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.pools import KvBytes, hisparse_pool, plain_tokens
from benchmarks.engine.prediction import Setting, compare, measured_crossover, table
from rollout.engine.throughput import Machine

MACHINE = Machine(hbm_bandwidth=3.9e12, host_bandwidth=5e10, step_overhead_s=1e-3, request_overhead_s=2e-5)
H200 = [json.loads(line) for line in Path("benchmarks/engine/h200.jsonl").read_text().splitlines()]
"""The run of ``docs/engine.md``, as recorded; 13 points."""
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


@pytest.fixture(scope="module")
def recorded():
    return compare(H200)


def test_every_point_of_an_h200_within_a_tenth(recorded):
    """The bar is a fifth. Nothing is fitted but two costs, to the two lowest points without HiSparse."""
    points = [line for line in recorded if line["section"] == "prediction"]
    assert len(points) == 13
    wrong = {(p["side"], p["concurrency"], p["locality"]): p["error"] for p in points if abs(p["error"]) > 0.1}
    assert wrong == {}


def test_plateaus_and_crossover_of_an_h200_within_a_fifth(recorded):
    for side in ("plain", "hisparse"):
        points = [line for line in recorded if line.get("side") == side]
        measured, predicted = (max(point[key] for point in points) for key in ("measured", "predicted"))
        assert predicted == pytest.approx(measured, rel=0.2)
    (crossover,) = (line for line in recorded if line["section"] == "crossover")
    assert crossover["predicted"] == pytest.approx(crossover["measured"], rel=0.2)


def test_what_each_part_of_the_model_explains():
    """Without the tiles' repeated reads 256 requests were predicted too fast; without the cost of a look-up, 8 were."""
    blind = [line | {"expert_tile_rows": None} if line["section"] == "setting" else line for line in H200]
    crowded = [line for line in compare(blind) if line.get("concurrency") == 256]
    assert all(line["error"] > 0.1 for line in crowded)
    free = [line | {"swap_overhead_s": 0.0} if line["section"] == "probe" else line for line in H200]
    (lonely,) = (line for line in compare(free) if (line.get("side"), line.get("concurrency")) == ("hisparse", 8))
    assert lonely["error"] > 0.03


def test_the_swap_in_s_own_timing_counts():
    timed = {"section": "kernels", "swap_in_bytes_per_s": 27e9, "swap_overhead_s": 50e-6}
    *_, machine = compare([*H200, timed])
    assert (machine["host_bandwidth"], machine["swap_overhead_s"]) == (27e9, 50e-6)
    *_, machine = compare([*H200, {"section": "kernels", "error": "no GPU"}])
    assert machine["host_bandwidth"] > 50e9


def test_a_table_of_it(recorded):
    text = table(recorded)
    assert "| hisparse | 256 | 94.8% | 14,124 |" in text
    assert "HiSparse is faster from: measured 49.8" in text
