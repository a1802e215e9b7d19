"""Weights are bitwise what was imported after every switch, within the budgets, whatever is moved when."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from teachers.errors import MissingTeacherError, TeacherError, TierFullError
from teachers.reader import DirectReader
from teachers.store import TeacherStore
from teachers.tiers import TierManager
from tests.teachers.made import SHARD, assert_same, finetuned, made_store, weights

COUNT = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Six plain teachers; three deltas of the first, one of them almost wholly changed; one that is half as large."""
    store, teachers = made_store(tmp_path_factory.mktemp("store"), COUNT)
    for name, share in (("few", 0.02), ("some", 0.2), ("most", 0.999)):
        teachers[name] = finetuned(teachers["t0"], share, seed=9)
        store.add(name, SHARD, teachers[name].items(), base="t0")
    teachers["small"] = weights(99, layers=1)
    store.add("small", SHARD, teachers["small"].items())
    return store, teachers


def size(made):
    return made[0].open("t0", SHARD).device_bytes


class Watched(TierManager):
    """Notes what is allocated, from a thread of its own, as long as it lives."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.most = [0, 0]
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    def _look(self):
        while not self._stop.wait(0.002):
            self.most = [max(a, b) for a, b in zip(self.most, self.memory(), strict=True)]

    def close(self):
        self._stop.set()
        self._watch.join()
        super().close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_switch_gives_the_imported_bits_within_both_budgets(made, data):
    store, teachers = made
    names = sorted(teachers)
    schedule = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=14))
    leased = data.draw(st.one_of(st.just(schedule), st.permutations(schedule), st.lists(st.sampled_from(names))))
    # decoding a delta needs at most 32 bytes an element of the largest matrix beside the images
    hbm = int(size(made) * data.draw(st.floats(1, 3))) + 32 * 192 * 64
    pinned = int(size(made) * data.draw(st.floats(2.1, 4)))
    tiers = Watched(store, SHARD, "cpu", hbm, pinned)
    try:
        tiers.plan(schedule)
        for name in leased:
            with tiers.lease(name) as views:
                assert_same(views, teachers[name])
        stats = tiers.stats()
        assert stats.leases == len(leased)
        assert stats.exposed_seconds == pytest.approx(sum(stats.exposed_by_teacher.values()))
    finally:
        tiers.close()
    assert tiers.most[0] <= hbm
    assert tiers.most[1] <= pinned


def test_what_follows_on_the_plan_is_loaded_while_one_is_leased(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made), 3 * size(made), teachers=["t1", "t2", "t3"])
    tiers.plan(["t1", "t2", "t3"])
    with tiers.lease("t1"):
        for _ in range(400):
            if "t2" in tiers.in_hbm and "t3" in tiers.in_pinned:
                break
            threading.Event().wait(0.05)
        assert tiers.in_hbm == {"t1", "t2"}
        assert "t3" in tiers.in_pinned
        before = tiers.stats()
    with tiers.lease("t2") as views:
        assert_same(views, teachers["t2"])
    assert tiers.stats().hbm_hits == before.hbm_hits + 1
    tiers.close()


def test_both_memories_together_are_the_disk_s_cache(made):
    """Two teachers on the device and three in pinned memory, one of them to swap by: four are read once."""
    store, _ = made
    names = ["t1", "t2", "t3", "t4"]
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made), int(3.1 * size(made)), teachers=names)
    tiers.plan(names)
    for name in names:
        with tiers.lease(name):
            pass
    for batch in range(5):
        order = names[::-1] if batch % 2 == 0 else names
        tiers.plan(order)
        for name in order:
            with tiers.lease(name):
                pass
    stats = tiers.stats()
    tiers.close()
    assert stats.disk_loads == 4
    assert stats.demotions > 0


class Paced:
    """A disk that answers so many reads, and more when it is told to."""

    def __init__(self, answers):
        self.answers = threading.Semaphore(answers)

    def __call__(self, descriptor, buffers, offset):
        assert self.answers.acquire(timeout=60)
        return os.preadv(descriptor, buffers, offset)


def test_what_leaves_the_device_takes_no_place_of_a_read_that_is_to_come(made):
    """It would be evicted for that read before its own next use: a copy for nothing."""
    store, teachers = made
    names = [f"t{i}" for i in range(COUNT)]
    disk = Paced(3)  # of one block each
    reader = DirectReader(preadv=disk)
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made), int(3.1 * size(made)), teachers=names, reader=reader)
    tiers.plan(names)
    for name in names[:3]:
        with tiers.lease(name) as views:
            assert_same(views, teachers[name])
    assert tiers.stats().demotions == 0  # three are to be read, into all places
    disk.answers.release(100)
    for name in names[3:]:
        with tiers.lease(name) as views:
            assert_same(views, teachers[name])
    assert tiers.stats().demotions > 0  # and now none is
    assert tiers.stats().disk_loads == COUNT
    tiers.close()


def test_a_teacher_that_is_waited_for_is_copied_while_the_rest_of_it_is_read(tmp_path, monkeypatch):
    store = TeacherStore(tmp_path)
    tensors = {f"layers.{i}.w": torch.randn(2048, 2048, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    store.add("t", SHARD, tensors.items())
    disk = Paced(3)  # four blocks
    reader = DirectReader(preadv=disk)
    tiers = TierManager(store, SHARD, "cpu", 1 << 27, 1 << 27, reader=reader)
    lane, copied = tiers._movers._lane, []
    take = lane.take

    def noted(begin, end, *args):
        copied.append(end - begin)
        return take(begin, end, *args)

    monkeypatch.setattr(lane, "take", noted)

    def answer():
        until(lambda: len(copied) == 3)
        assert tiers.in_hbm == tiers.in_pinned == set()
        threading.Event().wait(1)  # longer than the copies take on busy cores
        disk.answers.release()

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        with tiers.lease("t") as views:
            answered.result(60)
            assert_same(views, tensors)
    assert sum(copied) == store.open("t", SHARD).stored_bytes == tiers.stats().copied_bytes
    (copy,) = (span for span in tiers.stats().spans if span.kind == "copy")
    (read,) = (span for span in tiers.stats().spans if span.kind == "read")
    assert copy.stop - copy.start < read.stop - read.start  # waiting for the disk is not counted as copying
    tiers.close()


def test_a_delta_is_loaded_with_its_base_kept_once(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made) + 32 * 192 * 64, 3 * size(made), teachers=["few", "some"])
    for name in ("few", "some", "few", "t0"):
        with tiers.lease(name) as views:
            assert_same(views, teachers[name])
    read = tiers.stats().read_bytes
    tiers.close()
    assert read < 2 * size(made)


@pytest.mark.parametrize("images", [1, 2])
def test_a_base_that_is_on_the_device_is_copied_from_there_and_stays_meanwhile(made, images, monkeypatch):
    store, teachers = made
    hbm = images * size(made) + 32 * 192 * 64
    tiers = TierManager(store, SHARD, "cpu", hbm, 3 * size(made), teachers=["some", "t0"])
    with tiers.lease("t0"):
        pass
    before, lane, leased = tiers.stats().copied_bytes, tiers._movers._lane, []
    fill = lane.fill

    def noted(*args):
        leased.append(tiers._movers.hbm.books.leased)
        return fill(*args)

    monkeypatch.setattr(lane, "fill", noted)
    with tiers.lease("some") as views:
        assert_same(views, teachers["some"])
    copied = tiers.stats().copied_bytes - before
    assert leased == [{"some", "t0"} if images == 2 else {"some"}]
    assert (copied < 0.5 * size(made)) == (images == 2)  # the delta alone, or its base too
    assert tiers.offload() >= images * size(made)  # once all is done; what is still leased would be an error
    tiers.close()


@pytest.mark.parametrize("pinned_share", [3.0, 0.5])
@pytest.mark.parametrize("name", ["t1", "some"])
def test_one_that_is_larger_than_the_device_streams_in_order(made, name, pinned_share):
    store, teachers = made
    shard = store.open(name, SHARD)
    pinned = int(size(made) * (pinned_share if name == "t1" else pinned_share + 1.2))
    hbm = int(0.8 * size(made)) + (32 * 192 * 64 if name == "some" else 0)
    tiers = Watched(store, SHARD, "cpu", hbm, pinned, teachers=[name])
    try:
        with pytest.raises(TierFullError, match=f"teacher {name} has .* lease it by layers"), tiers.lease(name):
            pass
        for _ in range(2):
            with tiers.layers(name) as layers:
                seen = {}
                for (group, views), expected in zip(layers, shard.groups, strict=True):
                    assert group == expected.name
                    assert_same(views, {tensor: teachers[name][tensor] for tensor in expected.tensors})
                    seen |= views
            assert set(seen) == set(teachers[name])
    finally:
        tiers.close()
    assert tiers.most[0] <= hbm
    assert tiers.most[1] <= pinned


def test_two_that_are_larger_than_the_device_stream_one_after_the_other_and_a_small_one_between(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", int(0.8 * size(made)), 3 * size(made), teachers=["t1", "t2", "small"])
    tiers.plan(["t1", "small", "t2", "small"])
    for name in ("t1", "small", "t2", "small"):
        seen = {}
        with tiers.layers(name) as layers:
            for _, views in layers:
                seen |= {tensor: view.clone() for tensor, view in views.items()}
        assert_same(seen, teachers[name])
    tiers.close()


@pytest.mark.parametrize("hbm_share", [1.0, 0.8])
def test_an_image_of_another_size_is_freed_before_what_replaces_it_is_filled(made, hbm_share, monkeypatch):
    store, _ = made
    tiers = TierManager(store, SHARD, "cpu", int(hbm_share * size(made)), 3 * size(made), teachers=["t1", "small"])
    with tiers.lease("small"):
        image = StorageWeakRef(tiers._movers.hbm.images["small"].data.untyped_storage())
    allocate, freed = tiers._movers.allocate, []

    def noted(*args):
        memory = allocate(*args)
        freed.append(image.expired())
        return memory

    monkeypatch.setattr(tiers._movers, "allocate", noted)
    with tiers.layers("t1") as layers:  # whole, or streamed
        assert len(list(layers)) == len(store.open("t1", SHARD).groups)
    tiers.close()
    assert freed
    assert all(freed)


def test_a_stream_that_is_left_early_gives_its_memory_back(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", int(0.8 * size(made)), 3 * size(made), teachers=["t1", "small"])
    with tiers.layers("t1") as layers:
        next(iter(layers))
    with tiers.lease("small") as views:
        assert_same(views, teachers["small"])
    tiers.close()


def test_leases_that_leave_no_room_are_an_error_and_not_a_wait_for_ever(made):
    store, _ = made
    tiers = TierManager(store, SHARD, "cpu", size(made), 2 * size(made), teachers=["t1", "t2"])
    with (
        tiers.lease("t1"),
        pytest.raises(TierFullError, match=r"teacher t2 needs .* \['t1'\] are in use"),
        tiers.lease("t2"),
    ):
        pass
    with tiers.lease("t2"):
        pass
    with pytest.raises(MissingTeacherError, match="no teacher t9; there are t1, t2"):
        tiers.plan(["t9"])
    tiers.close()


def until(condition):
    for _ in range(1200):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not happen")


def test_offload_frees_the_device_and_reads_ahead_meanwhile_and_onload_copies_what_comes_next(made):
    store, teachers = made
    names = ["t1", "t2", "t3", "t4", "t5"]
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made), 3 * size(made), teachers=names)
    tiers.plan(["t1", "t2"])
    for name in ("t1", "t2"):
        with tiers.lease(name):
            pass
    held = tiers.memory()[0]
    assert tiers.offload() == held == 2 * size(made)
    assert tiers.offload() == 0
    assert tiers.memory()[0] == 0
    assert tiers.in_hbm == set()
    assert {"t1", "t2"} <= tiers.in_pinned  # what was on the device did not get lost
    tiers.plan(["t4", "t5", "t1"])
    until(lambda: tiers.in_pinned == {"t1", "t4", "t5"})
    with pytest.raises(TeacherError, match="teacher t4: GPU memory for teachers was given away"), tiers.lease("t4"):
        pass
    assert tiers.memory()[0] == 0
    tiers.onload()
    until(lambda: tiers.in_hbm == {"t4", "t5"})
    for name in ("t4", "t5", "t1", "t3"):
        with tiers.lease(name) as views:
            assert_same(views, teachers[name])
    tiers.close()


def test_offload_is_refused_while_a_teacher_is_leased_or_streams(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", 2 * size(made), 3 * size(made), teachers=["t1"])
    with tiers.lease("t1") as views:
        with pytest.raises(TierFullError, match=r"can't be given away: \['t1'\] are in use"):
            tiers.offload()
        assert_same(views, teachers["t1"])
    with tiers.lease("t1"):
        pass  # it was refused as a whole
    assert tiers.offload() > 0
    tiers.close()
    tiers = TierManager(store, SHARD, "cpu", int(0.8 * size(made)), 3 * size(made), teachers=["t1"])
    with tiers.layers("t1") as layers:
        next(iter(layers))
        with pytest.raises(TierFullError, match="stream of t1"):
            tiers.offload()
    tiers.offload()
    assert tiers.memory()[0] == 0
    tiers.onload()
    with tiers.layers("t1") as layers:
        assert len(list(layers)) == len(store.open("t1", SHARD).groups)
    tiers.close()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_bits_are_right_whenever_the_device_was_away(made, data):
    store, teachers = made
    names = sorted(teachers)
    steps = data.draw(st.lists(st.one_of(st.sampled_from(names), st.just("away")), min_size=1, max_size=14))
    hbm, pinned = 2 * size(made) + 32 * 192 * 64, int(2.5 * size(made))
    tiers = Watched(store, SHARD, "cpu", hbm, pinned)
    try:
        tiers.plan([step for step in steps if step != "away"])
        for step in steps:
            if step == "away":
                tiers.offload()
                assert tiers.memory()[0] == 0
                tiers.onload()
                continue
            with tiers.lease(step) as views:
                assert_same(views, teachers[step])
    finally:
        tiers.close()
    assert tiers.most[0] <= hbm
    assert tiers.most[1] <= pinned


def test_several_threads_lease_at_once(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", 4 * size(made), 3 * size(made), teachers=[f"t{i}" for i in range(COUNT)])
    failures = []

    def work(start):
        try:
            for step in range(12):
                name = f"t{(start + step * (start + 1)) % COUNT}"
                with tiers.lease(name) as views:
                    assert_same(views, teachers[name])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    tiers.close()
    assert not failures


def test_fp8_is_close_and_says_how_close(tmp_path):
    store = TeacherStore(tmp_path)
    original = weights(1, width=128)
    added = store.add("small", SHARD, original.items(), fp8=True)
    assert 0.01 < added.fp8_error < 0.05
    assert added.new_bytes < 0.8 * store.open("small", SHARD).device_bytes
    tiers = TierManager(store, SHARD, "cpu", 1 << 25, 1 << 20)
    with tiers.lease("small") as views:
        for name, tensor in original.items():
            if tensor.dim() == 2 and tensor.numel():
                error = (views[name].float() - tensor.float()).norm() / tensor.float().norm()
                assert error == pytest.approx(store.open("small", SHARD).tensors[name].error, rel=1e-4)
            else:
                assert torch.equal(views[name], tensor)
    tiers.close()
