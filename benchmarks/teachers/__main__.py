"""``python -m benchmarks.teachers [--device cpu|cuda] [--json FILE]``: reads, copies, batches of twelve teachers.

Sides are run in turn, medians are over ``--rounds``. On a GPU teachers have a billion parameters, or as many as let all
rounds end within ``--seconds`` on this disk, which is tried before; what was taken is said. The rounds still end early
when it is slower than that (the table says how many there were). The JSON is written again after each part.
``--draw FILE`` makes the timeline's picture of a JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.teachers import made, picture, raw
from benchmarks.teachers.summary import Wait
from benchmarks.teachers.swaps import LOOKS, Alone, PinnedCopies, Safetensors, Scoring, Tiers

COUNT = 12
RATIOS = (1.0, 2.0, 0.5)
CALIBRATION = {"cpu": 5, "cuda": 1}
"""Batches of (a) that say how long scoring has to take; the table has the ratio that it came to in the end."""

WIDEST, STEP = 2048, 64
RAW_WIDTH = 1440
"""A teacher of 1.0 GB."""

# What the parts take in reads of one teacher, and in seconds, as seen on an H200.
LOADING = 8.5
"""(a) of a batch: eight reads, and copies."""
COMPARED, PINNED = 12.6, 4
"""Once: every teacher's bits; the four that (a) keeps."""
SCORED = 3.5 * LOOKS["cuda"]
"""All ratios together, in loadings of (a): what the scoring of one teacher takes alone."""
EXPOSED, SAMPLED = 7.8, 3.4
"""A round: what the shortest batch waits; a part of (a)'s loads and one of (b)'s."""
RAW_S_PER_GB, START_S, SPARE = 2.5, 10, 0.9


def widest(seconds: float, rounds: int, read_gb_s: float, import_gb_s: float) -> int:
    """Width of teachers with which so many rounds take so long, at most ``WIDEST``."""
    once = COMPARED + PINNED + LOADING + SCORED / COUNT * LOADING
    reads = once + rounds * (3 * LOADING + EXPOSED + SAMPLED)
    gb = (SPARE * seconds - START_S) / (reads / read_gb_s + COUNT / (2 * import_gb_s) + RAW_S_PER_GB)
    width = int((max(gb, 0.0) * 1e9 / made.Architecture(1).nbytes) ** 0.5) // STEP * STEP
    return min(WIDEST, max(STEP, width))


def main() -> int:
    options = _options()
    if options.draw:
        picture.draw(json.loads(options.draw.read_text()), options.ratio, options.out)
        return 0
    with made.own_folder(options.root, "bench_teachers") as options.root:
        Bench(options).run()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder on the disk to measure")
    parser.add_argument(
        "--width", type=int, help="hidden size: 2048 has 1.0 B parameters, 512 63 M (default on the CPU)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0, help="end by then: smaller teachers, or fewer rounds")
    parser.add_argument("--draw", type=Path, help="only draw the timeline of this JSON")
    parser.add_argument("--ratio", default="1.0", help="which one --draw draws")
    parser.add_argument("--out", type=Path, default=Path("teachers_timeline.png"))
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.perf_counter()
        self.device = torch.device(options.device)
        self.teachers = made.names(COUNT)
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU (a host buffer as the device)"
        self.results: dict[str, Any] = {"device": name, "torch": torch.__version__, "teachers": COUNT}

    def note(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {line}", flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self) -> None:
        width = self.options.width or (512 if self.device.type == "cpu" else None)
        read_gb_s, import_gb_s = self._disk(width or RAW_WIDTH)
        if width is None:
            left = self.options.seconds - (time.perf_counter() - self.started)
            width = widest(left, self.options.rounds, read_gb_s, import_gb_s)
        self.architecture = made.Architecture(width)
        store, seconds = made.write_store(self.options.root / "store", self.teachers, self.architecture, self.device)
        size = store.open(self.teachers[0], made.SHARD).stored_bytes
        self.results |= {"width": width, "teacher_bytes": size, "import_gb_s": COUNT * size / 1e9 / seconds}
        self.note(f"{COUNT} teachers of {size / 1e9:.3f} GB imported at {self.results['import_gb_s']:.2f} GB/s")
        copy = self.results["copy"] = raw.device(store, self.teachers[0], self.device, self.options.rounds)
        self.note(
            f"pinned → device: {copy['ours_gb_s']:.1f} GB/s = {copy['share_of_one_copy']:.1%} of one copy of all of it"
        )
        self._swaps(store)

    def _disk(self, width: int) -> tuple[float, float]:
        """Reads of about 1 GB; the speeds of reading and of importing."""
        root, architecture = self.options.root / "raw", made.Architecture(width)
        few = self.teachers[: max(1, round(1e9 / architecture.nbytes))]
        store, seconds = made.write_store(root, few, architecture, self.device)
        disk = self.results["disk"] = raw.disk(store, few, self.options.rounds, self.device.type == "cuda")
        self.note(
            f"disk → pinned: {disk['ours_gb_s']:.2f} GB/s = {disk['share_of_best']:.1%} of the best tool"
            f" ({disk['best_tool']}, {disk['best_tool_gb_s']:.2f}); {disk['cpu_s_per_gb']:.3f} CPU-s/GB"
        )
        shutil.rmtree(root)
        return disk["ours_gb_s"], disk["bytes"] / 1e9 / seconds

    def _swaps(self, store: Any) -> None:
        pinned = PinnedCopies(store, self.teachers, self.device)
        files = Safetensors(self.options.root / "hf", self.architecture, self.device)
        ours = Tiers(store, self.teachers, self.architecture, self.device)
        scoring = Scoring(self.device)
        self.note("sides are ready")
        first = ours.batch(lambda: None, check=True)
        a = [pinned.batch() for _ in range(CALIBRATION[self.device.type])]
        loading = statistics.median(a)
        self.note(
            f"every bit of {COUNT} teachers compared; (a) waits {loading:.2f} s, ours unscored {first['wall']:.2f} s"
        )
        work = {ratio: scoring.make(ratio * loading / COUNT) for ratio in RATIOS}
        b: list[float] = []
        rows: dict[float, list[dict[str, Any]]] = {ratio: [] for ratio in RATIOS}
        for _ in range(self.options.rounds):
            began = time.perf_counter()
            for ratio in RATIOS:
                rows[ratio].append(ours.batch(work[ratio].run))
            a.append(pinned.part(len(b)))
            b.append(files.load())
            self._summarize(a, b, rows, work, ours)
            now = time.perf_counter()
            if now - self.started + (now - began) > self.options.seconds:
                break
        if ours.most[0] > ours.hbm_bytes or ours.most[1] > ours.pinned_bytes:
            raise RuntimeError(f"a budget was exceeded: {ours.most}")
        ours.close()
        pinned.close()

    def _summarize(
        self, a: list[float], b: list[float], rows: dict[float, Any], work: dict[float, Alone], ours: Tiers
    ) -> None:
        loading, slow = statistics.median(a), COUNT * statistics.median(b)
        self.results |= {"a_seconds": a, "a_wait": loading, "b_wait": slow, "most_bytes": ours.most, "ratios": {}}
        self.results["budgets"] = [ours.hbm_bytes, ours.pinned_bytes]
        for ratio, batches in rows.items():
            scored, spread = COUNT * work[ratio].seconds, COUNT * work[ratio].spread
            waits = [batch["wall"] - scored for batch in batches]
            middle = batches[sorted(range(len(waits)), key=lambda i: waits[i])[len(waits) // 2]]
            wait = Wait.of(waits, scored, spread)
            # The disk and the copies work side by side: loading takes as long as the one that has more to do.
            load = max(statistics.median(x[lane] for x in batches) for lane in ("disk_seconds", "copy_seconds"))
            self.results["ratios"][str(ratio)] = row = {
                "rounds": len(batches),
                "scoring": scored,
                "scoring_spread": spread,
                "measured_ratio": scored / loading,
                "wait": wait.seconds,
                "wait_resolution": wait.resolution,
                "wait_is_told": wait.is_told,
                "waits": waits,
                "leases_waited": statistics.median(batch["waited"] for batch in batches),
                "share_of_scoring_at_most": wait.at_most / scored,
                "load": load,
                "over_bound": (scored + wait.seconds) / max(scored, load),
                "a_over_ours": wait.multiple(loading),
                "b_over_ours": wait.multiple(slow),
                "bound": loading / (loading - scored) if scored < loading else None,
                "disk_loads": statistics.median(batch["disk_loads"] for batch in batches),
                "demotions": statistics.median(batch["demotions"] for batch in batches),
                "timeline": middle["spans"],
            }
            bound = f", bound L/(L−S) {row['bound']:.2f}" if row["bound"] else ""
            self.note(
                f"scoring/loading {ratio} ({scored / loading:.2f}): S {scored:.2f} s, wait {wait.said(scored)},"
                f" total/max(S, load) {row['over_bound']:.2f}, (a) waits {wait.times(loading)}, (b)"
                f" {wait.times(slow)} as long{bound}; {row['disk_loads']:.0f} disk loads, {len(batches)} rounds"
            )


if __name__ == "__main__":
    sys.exit(main())
