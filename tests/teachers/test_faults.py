"""A fault of one teacher's file fails the lease of that teacher, by name, and nothing else."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from teachers.errors import CorruptTeacherError, MissingTeacherError, StalledReadError, TeacherError, TierFullError
from teachers.reader import DirectReader
from teachers.store import TeacherStore
from teachers.tiers import TierManager
from tests.teachers.made import SHARD, assert_same, made_store

HBM, PINNED = 1 << 18, 1 << 20


@pytest.fixture
def made(tmp_path):
    return made_store(tmp_path, 3)


def pack_of(store, name):
    shard = store.open(name, SHARD)
    (path,) = {shard.pack_path(extent) for extent in shard.manifest.extents.values()}
    return path


def lease(tiers, name, teachers):
    with tiers.lease(name) as views:
        assert_same(views, teachers[name])


def flip(path, at=5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (flip, CorruptTeacherError, r"damaged between bytes 0 and .* \(checksum\)"),
        (lambda path: os.truncate(path, 8192), CorruptTeacherError, "ends at byte 8192"),
        (lambda path: os.truncate(path, 8000), CorruptTeacherError, "ends at byte 8000"),
        (os.unlink, MissingTeacherError, "is missing"),
    ],
    ids=["corrupted", "truncated", "truncated within a page", "missing"],
)
def test_a_damaged_teacher_is_named_and_the_others_go_on(made, damage, error, says):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED)
    pack = pack_of(store, "t1")
    before = pack.read_bytes()
    damage(pack)
    tiers.plan(["t0", "t1", "t2", "t1"])
    lease(tiers, "t0", teachers)
    for _ in range(2):
        with pytest.raises(error, match=f"teacher t1: .*{pack.name}.* {says}|teacher t1: .*{pack.name} {says}"):
            lease(tiers, "t1", teachers)
    lease(tiers, "t2", teachers)
    pack.write_bytes(before)
    lease(tiers, "t1", teachers)  # a file that came back is read again
    tiers.close()


def test_a_copy_in_memory_needs_no_file(made):
    store, teachers = made
    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED)
    for name in teachers:
        lease(tiers, name, teachers)
    for name in teachers:
        pack_of(store, name).unlink()
    for name in [*teachers, *reversed(list(teachers))]:
        lease(tiers, name, teachers)
    assert tiers.stats().disk_loads == 3
    tiers.close()


class Hanging:
    """A disk that does not answer until it is told to."""

    def __init__(self):
        self.hang = True
        self.answer = threading.Event()

    def __call__(self, descriptor, buffers, offset):
        if self.hang:
            self.answer.wait(60)
        return os.preadv(descriptor, buffers, offset)


def test_a_stalled_reader_is_an_error_and_its_memory_is_not_used_until_it_lets_go(made):
    store, teachers = made
    disk = Hanging()
    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED, reader=DirectReader(stall_seconds=0.3, preadv=disk))
    with pytest.raises(StalledReadError, match=r"teacher t1: .*\.pack at byte 0: no block was read for 0.3 s"):
        lease(tiers, "t1", teachers)
    disk.hang = False
    lease(tiers, "t2", teachers)  # the disk answers again, the hanging thread still holds its frames
    with pytest.raises(StalledReadError, match="teacher t1: an earlier read of it still hangs"):
        lease(tiers, "t1", teachers)
    held = tiers.memory()[1]
    disk.answer.set()
    for _ in range(200):
        if tiers.memory()[1] < held:
            break
        threading.Event().wait(0.05)
    lease(tiers, "t1", teachers)
    tiers.close()


def test_damage_in_a_later_block_of_a_teacher_that_is_copied_on_while_it_is_read(tmp_path):
    """Its first blocks are on the device by then: nothing of it is used, and its memory serves the next."""
    store = TeacherStore(tmp_path)
    teachers = {
        name: {f"layers.{i}.w": torch.full((2048, 2048), float(10 * seed + i)) for i in range(3)}
        for seed, name in enumerate(("t0", "t1"))
    }
    for name, tensors in teachers.items():
        store.add(name, SHARD, tensors.items())
    pack = pack_of(store, "t0")
    flip(pack, at=(2 << 24) + 5)
    first = threading.Event()

    def in_order(descriptor, buffers, offset):
        if offset >= 2 << 24:
            first.wait(60)
        return os.preadv(descriptor, buffers, offset)

    tiers = TierManager(store, SHARD, "cpu", 50 << 20, 1 << 27, reader=DirectReader(preadv=in_order))
    take = tiers._movers._lane.take

    def noted(*args):
        moved = take(*args)
        first.set()
        return moved

    tiers._movers._lane.take = noted
    follow, again = tiers._movers._follow, threading.Event()

    def late(*args):
        try:
            return follow(*args)
        except TeacherError:
            again.wait(60)
            raise

    tiers._movers._follow = late
    with pytest.raises(CorruptTeacherError, match=f"teacher t0: .*{pack.name} is damaged between bytes"):
        lease(tiers, "t0", teachers)
    assert first.is_set()
    assert tiers.in_hbm == tiers.in_pinned == set()
    flip(pack, at=(2 << 24) + 5)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(lease, tiers, "t0", teachers)
        while "t0" not in tiers._movers._wanted:
            assert not second.done()
            again.wait(0.01)
        again.set()  # that the first attempt failed is not the second one's error
        second.result(60)
    lease(tiers, "t1", teachers)
    tiers.close()


def test_a_read_that_failed_before_its_copy_began_fails_that_lease_alone(made):
    """Whoever copies it on had to wait for an image's place, and finds that there is nothing to copy."""
    store, teachers = made
    flip(pack_of(store, "t0"))
    booked = threading.Event()

    def when_booked(descriptor, buffers, offset):
        booked.wait(60)
        return os.preadv(descriptor, buffers, offset)

    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED, reader=DirectReader(preadv=when_booked))
    movers = tiers._movers
    vacate = movers.vacate

    def slow(*args):
        booked.set()
        with movers.changed:
            assert movers.changed.wait_for(lambda: not movers._arriving, 60)
        vacate(*args)

    movers.vacate = slow
    with pytest.raises(CorruptTeacherError, match=r"teacher t0: .* is damaged between bytes"):
        lease(tiers, "t0", teachers)
    assert booked.is_set()
    lease(tiers, "t1", teachers)
    tiers.close()


def test_after_a_disk_that_fails_now_and_then_nothing_is_leased_or_lost(tmp_path):
    store, teachers = made_store(tmp_path, 6)
    size, numbers = store.open("t0", SHARD).device_bytes, random.Random(0)

    def unsteady(descriptor, buffers, offset):
        if numbers.random() < 0.2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, buffers, offset)

    tiers = TierManager(store, SHARD, "cpu", 2 * size, int(2.2 * size), reader=DirectReader(preadv=unsteady))
    movers = tiers._movers

    def lease_some(seed):
        mine, failures = random.Random(seed), []
        for _ in range(60):
            try:
                lease(tiers, f"t{mine.randrange(6)}", teachers)
            except TeacherError as error:
                failures.append(str(error))
        return failures

    with ThreadPoolExecutor(2) as pool:
        failures = [failure for some in pool.map(lease_some, range(2)) for failure in some]
    assert failures
    assert all("Input/output error" in failure for failure in failures)
    with movers.changed:
        assert movers.changed.wait_for(lambda: not movers.busy, 60)
        for books in (movers.hbm.books, movers.pinned.books):
            assert not +books._leases
        assert movers.hbm.books.resident == movers.hbm.ready == movers.hbm.images.keys()
        assert movers.pinned.books.resident == movers.pinned.ready == movers.pinned.frames.keys()
    tiers.close()


def test_an_input_output_error_names_teacher_and_file(made):
    store, teachers = made

    def broken(descriptor, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED, reader=DirectReader(preadv=broken))
    with pytest.raises(TeacherError, match=r"teacher t0: .*\.pack at byte 0: Input/output error"):
        lease(tiers, "t0", teachers)
    tiers.close()


def test_without_o_direct_files_are_read_all_the_same_and_it_is_said_once(made, caplog):
    store, teachers = made

    def refuses(descriptor, buffers, offset):
        if os.get_inheritable(descriptor) or _is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.preadv(descriptor, buffers, offset)

    tiers = TierManager(store, SHARD, "cpu", HBM, PINNED, reader=DirectReader(threads=1, preadv=refuses))
    for name in teachers:
        lease(tiers, name, teachers)
    tiers.close()
    assert sum("no O_DIRECT" in record.message for record in caplog.records) == 1


def _is_direct(descriptor):
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_what_is_too_large_for_its_tier_is_named_with_both_sizes(made):
    store, teachers = made
    size = store.open("t0", SHARD).device_bytes
    tiers = TierManager(store, SHARD, "cpu", size - 1, PINNED)
    with pytest.raises(TierFullError, match=f"teacher t0 has {size} bytes, GPU memory for teachers holds {size - 1}"):
        lease(tiers, "t0", teachers)
    tiers.close()
    tiers = TierManager(store, SHARD, "cpu", 4096, PINNED)
    with (
        pytest.raises(TierFullError, match=r"t0 has \d+ bytes, the tier holds 4096"),
        tiers.layers("t0") as layers,
    ):
        next(iter(layers))
    tiers.close()
    tiers = TierManager(store, SHARD, "cpu", HBM, 8192)
    with pytest.raises(TierFullError, match=r"t0.* has \d+ bytes, the tier holds 8192"):
        lease(tiers, "t0", teachers)
    tiers.close()


@pytest.mark.parametrize("pinned_share", [3.0, 0.5])
def test_a_layer_that_cannot_be_read_is_told_and_the_stream_goes_on_of_nan(made, pinned_share):
    store, teachers = made
    shard = store.open("t0", SHARD)
    size = shard.device_bytes
    _, extent = shard.extent_of("decoder.layers.1.mlp.weight")
    tiers = TierManager(store, SHARD, "cpu", int(0.8 * size), int(pinned_share * size), teachers=["t0"])
    for _ in range(2):  # what was read into pinned memory before needs no file
        failures = []
        with tiers.layers("t0", failures.append) as layers:
            good = {name: view.clone() for _, views in layers for name, view in views.items()}
            assert_same(good, teachers["t0"])
            flip(shard.pack_path(extent), extent.offset + 5)
            seen = {name: view.clone() for _, views in layers for name, view in views.items()}
            flip(shard.pack_path(extent), extent.offset + 5)
        if pinned_share > 1:
            assert failures == []
            assert_same(seen, teachers["t0"])
            continue
        (failure,) = failures
        assert isinstance(failure, CorruptTeacherError)
        assert "t0" in str(failure)
        assert str(shard.pack_path(extent)) in str(failure)
        assert seen.keys() == teachers["t0"].keys()
        assert torch.equal(seen["embedding.weight"], teachers["t0"]["embedding.weight"])
        for name in ("decoder.layers.1.mlp.weight", "decoder.layers.3.mlp.weight"):
            assert seen[name].isnan().all(), name
            assert seen[name].shape == teachers["t0"][name].shape
    tiers.close()
