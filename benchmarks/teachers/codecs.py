"""``python -m benchmarks.teachers.codecs [--device cpu|cuda] [--width N] [--json FILE]``: how long a switch takes, by
how a teacher is kept.

One teacher whole, two as differences to it (a share of 5 % and of 30 % of each matrix's elements changed) and one in
fp8, each moved from disk to pinned memory once and from there to the device ``--rounds`` times, in turn, in the place
of the one before; and the differences again, beside what they differ from. A switch is the copy and the decoding. Every
bit of the exact ones is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.teachers.made import SHARD, Architecture, own_folder
from teachers import codec
from teachers.shard import StoredShard
from teachers.store import TeacherStore
from teachers.tiers import TierManager

SHARES = {"delta 5 %": 0.05, "delta 30 %": 0.3}
SLUGS = {"whole": "whole", "delta 5 %": "delta05", "delta 30 %": "delta30", "fp8": "fp8"}


def tensors(architecture: Architecture, share: float, device: str) -> Iterator[tuple[str, Tensor]]:
    """Normally distributed weights, a share of them moved by half."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in architecture.shapes().items():
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        if share:
            changed = torch.rand(shape, device=device, generator=torch.Generator(device).manual_seed(1)) < share
            weight = torch.where(changed, weight * 1.5, weight)
        yield name, weight


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=768 if torch.cuda.is_available() else 256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder on the disk to use")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with own_folder(options.root, "bench_codecs") as options.root:
        rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    architecture, store = Architecture(options.width), TeacherStore(options.root)
    store.add("whole", SHARD, tensors(architecture, 0.0, options.device))
    for name, share in SHARES.items():
        store.add(SLUGS[name], SHARD, tensors(architecture, share, options.device), base="whole")
    store.add("fp8", SHARD, tensors(architecture, 0.0, options.device), fp8=True)
    shards = {slug: store.open(slug, SHARD) for slug in SLUGS.values()}
    size = shards["whole"].device_bytes
    deltas = [SLUGS[name] for name in SHARES]
    alone = switches(options, store, shards, 1, [*shards])
    beside = switches(options, store, shards, 2, [slug for delta in deltas for slug in ("whole", delta)])
    seconds = {name: alone[slug] for name, slug in SLUGS.items()}
    seconds |= {f"{name}, base there": beside[SLUGS[name]] for name in SHARES}
    rows: list[dict[str, object]] = []
    for name, (switch, read) in seconds.items():
        stored = shards[SLUGS[name.removesuffix(", base there")]].stored_bytes
        rows.append({"kept": name, "stored": stored, "device": size, "switch_s": switch, "read_s": read})
        print(
            f"{name:24} {stored / 1e9:7.3f} of {size / 1e9:.3f} GB stored, read in {read:.3f} s, switched to in "
            f"{switch * 1e3:.1f} ms ({size / switch / 1e9:.1f} GB/s of weights)",
            flush=True,
        )
    return rows


def switches(
    options: argparse.Namespace, store: TeacherStore, shards: Mapping[str, StoredShard], images: int, order: list[str]
) -> dict[str, tuple[float, float]]:
    """Seconds of a switch, and of the read, with room for so many images. The first round brings them into pinned
    memory, and compiles what decodes them."""
    size = shards["whole"].device_bytes
    numel = max(tensor.numel for tensor in shards["whole"].manifest.tensors)
    hbm = images * (size + (2 << 20)) + codec.workspace_bytes(numel) + (2 << 20)
    pinned = sum(shard.stored_bytes for shard in shards.values()) + (256 << 20)
    tiers = TierManager(store, SHARD, options.device, hbm, pinned)
    try:
        for _ in range(options.rounds + 1):
            for slug in order:
                with tiers.lease(slug):
                    pass
        for name, slug in SLUGS.items():
            if slug in order and slug != "fp8":
                compare(tiers, slug, tensors(Architecture(options.width), SHARES.get(name, 0.0), options.device))
        spans = tiers.stats().spans
    finally:
        tiers.close()
    found = {}
    for slug in order:
        copies = [span.stop - span.start for span in spans if (span.kind, span.teacher) == ("copy", slug)]
        reads = [span.stop - span.start for span in spans if (span.kind, span.teacher) == ("read", slug)]
        found[slug] = (statistics.median(copies[1 : options.rounds + 1] or copies), reads[0])
    return found


def compare(tiers: TierManager, slug: str, imported: Iterator[tuple[str, Tensor]]) -> None:
    with tiers.lease(slug) as weights:
        for name, expected in imported:
            if not torch.equal(weights[name].view(torch.int16), expected.view(torch.int16)):
                raise RuntimeError(f"{slug}: {name} is not what was imported")


if __name__ == "__main__":
    raise SystemExit(main())
