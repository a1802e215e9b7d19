"""On a real GPU: the same bits after every switch, registered memory, and no more of the device than the budget."""

from __future__ import annotations

import pytest
import torch

from teachers.tiers import TierManager
from tests.teachers.made import SHARD, assert_same, finetuned, made_store, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DECODING = 32 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Teachers of 24 MB, two deltas, and one in fp8."""
    store, teachers = made_store(tmp_path_factory.mktemp("store"), 4, width=1024)
    for name, share in (("few", 0.02), ("some", 0.3)):
        teachers[name] = finetuned(teachers["t0"], share, seed=9)
        store.add(name, SHARD, teachers[name].items(), base="t0")
    teachers["eight"] = weights(77, width=1024)
    store.add("eight", SHARD, teachers["eight"].items(), fp8=True)
    on_cpu = TierManager(store, SHARD, "cpu", 1 << 27, 1 << 27, teachers=["eight"])
    with on_cpu.lease("eight") as views:
        teachers["eight"] = {tensor: view.clone() for tensor, view in views.items()}  # as it is decoded there
    on_cpu.close()
    return store, teachers


def test_every_switch_gives_the_same_bits_and_the_allocator_stays_within_the_budget(made):
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    hbm = 2 * size + (8 << 20) + DECODING
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tiers = TierManager(store, SHARD, "cuda", hbm, 3 * size)
    schedule = ["t1", "few", "t2", "some", "eight", "t3", "t0", "few", "t1", "t2"] * 2
    tiers.plan(schedule)
    most = 0
    for name in [*schedule, "t1", "t2", "t3", "t0", "t1", "t2"]:  # the last few without a plan
        with tiers.lease(name) as views:
            # read on the consumer's stream right away, as a forward pass would
            kept = {tensor: view.cpu() for tensor, view in views.items()}
        most = max(most, torch.cuda.max_memory_allocated() - before)
        assert_same(kept, teachers[name])
    assert most <= hbm
    assert tiers.memory()[1] <= 3 * size
    assert tiers.stats().demotions > 0
    tiers.close()


def test_a_delta_whose_base_is_on_the_device_takes_its_own_bytes_over_the_link(made):
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    tiers = TierManager(store, SHARD, "cuda", 2 * size + (8 << 20) + DECODING, 3 * size, teachers=["few", "t0"])
    with tiers.lease("t0"):
        pass
    before = tiers.stats().copied_bytes
    with tiers.lease("few") as views:
        assert_same({tensor: view.cpu() for tensor, view in views.items()}, teachers["few"])
    assert tiers.stats().copied_bytes - before < 0.2 * size
    tiers.close()


def test_work_that_is_still_queued_when_a_lease_ends_sees_its_own_weights(made):
    """The buffer is given to the next teacher at once: the copy has to wait for the reader's stream."""
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    tiers = TierManager(store, SHARD, "cuda", size + (4 << 20), 4 * size, teachers=["t1", "t2", "t3"])
    slow = torch.randn(4096, 4096, device="cuda")
    got = []
    for name in ["t1", "t2", "t3"] * 5:
        with tiers.lease(name) as views:
            for _ in range(30):
                slow = (slow @ slow).clamp(-1, 1)
            got.append((name, views["embedding.weight"].clone()))  # queued behind the products
    for name, tensor in got:
        assert torch.equal(tensor.cpu(), teachers[name]["embedding.weight"])
    tiers.close()


@pytest.mark.parametrize("name", ["t1", "some"])
def test_one_that_is_larger_than_the_device_streams(made, name):
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    tiers = TierManager(store, SHARD, "cuda", int(0.8 * size) + DECODING, 3 * size, teachers=["t1", "some"])
    with tiers.layers(name) as layers:
        seen = {}
        for _, views in layers:
            seen |= {tensor: view.clone() for tensor, view in views.items()}
    assert_same({tensor: view.cpu() for tensor, view in seen.items()}, teachers[name])
    tiers.close()


def test_the_arena_is_registered_and_copies_from_it_do_not_block(made):
    store, _ = made
    tiers = TierManager(store, SHARD, "cuda", 1 << 28, 1 << 26, teachers=["t1"])
    assert tiers._movers.pinned.arena.memory.is_pinned()
    tiers.close()


def test_offload_gives_the_device_s_memory_back_to_other_processes(made):
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    names = ["t1", "few", "eight", "t2"]
    tiers = TierManager(store, SHARD, "cuda", 3 * size + (8 << 20) + DECODING, 6 * size, teachers=names)
    for name in names:
        with tiers.lease(name):
            pass
    assert torch.cuda.mem_get_info()[0] < before - 2 * size
    assert tiers.offload() >= 2 * size
    assert tiers.memory()[0] == 0
    assert torch.cuda.mem_get_info()[0] >= before - (32 << 20)  # but for what CUDA itself took meanwhile
    tiers.plan(names)
    tiers.onload()
    for name in names:
        with tiers.lease(name) as views:
            assert_same({tensor: view.cpu() for tensor, view in views.items()}, teachers[name])
    tiers.close()
