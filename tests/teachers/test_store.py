"""What is imported comes back bit for bit, is kept once, and every damage to it is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teachers.errors import CorruptTeacherError, ImportFailedError, MissingTeacherError, TeacherError
from teachers.store import TeacherStore
from teachers.tiers import TierManager
from teachers.upkeep import gc, verify
from tests.teachers.made import SHARD, assert_same, finetuned, made_store, weights


def loaded(store, name):
    tiers = TierManager(store, SHARD, "cpu", 1 << 23, 1 << 21, teachers=[name])
    try:
        with tiers.lease(name) as views:
            return {tensor: view.clone() for tensor, view in views.items()}
    finally:
        tiers.close()


def test_shared_tensors_are_kept_once_in_a_teacher_and_across_teachers(tmp_path):
    store, teachers = made_store(tmp_path, 1, width=256)
    first = sum(path.stat().st_size for path in store.packs.iterdir())
    other = {**teachers["t0"], "scale": torch.tensor(5.0)}
    added = store.add("other", SHARD, other.items())
    assert added.new_bytes == 4096
    assert sum(path.stat().st_size for path in store.packs.iterdir()) == first + 4096
    assert first < sum(t.nbytes for t in teachers["t0"].values())  # embedding and head are one
    assert_same(loaded(store, "other"), other)
    assert verify(store) == []


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_delta_gives_every_bit_back_and_is_kept_only_when_smaller(tmp_path, share):
    store, teachers = made_store(tmp_path, 1)
    tuned = finetuned(teachers["t0"], share, seed=3)
    added = store.add("tuned", SHARD, tuned.items(), base="t0")
    assert_same(loaded(store, "tuned"), tuned)
    assert ("delta" in added.encodings) == (share < 1)
    if share == 0.01:
        assert added.new_bytes < 0.35 * store.open("t0", SHARD).stored_bytes


def test_a_base_that_nothing_is_kept_of_is_not_needed(tmp_path):
    store, _ = made_store(tmp_path, 1)
    other = {name: tensor + 1 if tensor.numel() else tensor for name, tensor in weights(5).items()}
    added = store.add("other", SHARD, other.items(), base="t0")
    assert set(added.encodings) == {"raw"}
    assert store.open("other", SHARD).base is None
    store.remove("t0")
    assert_same(loaded(store, "other"), other)


def test_extents_are_aligned_and_small_shards_of_other_ranks_stand_beside(tmp_path):
    store, _ = made_store(tmp_path, 1)
    store.add("t0", "tp1of2", {"only": torch.arange(5)}.items())
    assert store.shards("t0") == (SHARD, "tp1of2")
    assert store.open("t0", "tp1of2").shapes == {"only": (5,)}
    for shard in store.shards("t0"):
        assert all(extent.offset % 4096 == 0 for extent in store.open("t0", shard).manifest.extents.values())
    shard = store.open("t0", SHARD)
    assert [group.name for group in shard.groups][:2] == ["embedding.weight", "decoder.layers.0"]
    assert shard.dtypes["scale"] == torch.float64


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One small teacher and one delta of it."""
    store = TeacherStore(tmp_path_factory.mktemp("store"))
    tensors = weights(0, width=16, layers=1)
    store.add("t0", SHARD, tensors.items())
    store.add("tuned", SHARD, finetuned(tensors, 0.01, 1).items(), base="t0")
    return store


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_found(small, data):
    files = sorted([*small.packs.glob("*.pack"), *small.teachers.glob("*/*.json")])
    path = data.draw(st.sampled_from(files))
    before = path.read_bytes()
    position = data.draw(st.integers(0, 8 * len(before) - 1))
    damaged = bytearray(before)
    damaged[position // 8] ^= 1 << position % 8
    path.write_bytes(damaged)
    sizes = {name: small.open(name, SHARD).stored_bytes for name in ("t0", "tuned")} if path.suffix == ".pack" else {}
    try:
        assert any(path.name in str(problem) for problem in verify(small))
        if path.suffix == ".json":
            with pytest.raises(CorruptTeacherError, match=f"teacher {path.parent.name}"):
                small.open(path.parent.name, SHARD)
        else:
            owner = "t0" if path.stat().st_size == sizes["t0"] else "tuned"
            with pytest.raises(CorruptTeacherError, match=f"teacher {owner}: .*{path.name}"):
                loaded(small, owner)
    finally:
        path.write_bytes(before)
    assert verify(small) == []


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_truncation_is_found(small, data):
    path = data.draw(st.sampled_from(sorted([*small.packs.glob("*.pack"), *small.teachers.glob("*/*.json")])))
    before = path.read_bytes()
    path.write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
    try:
        assert any(path.name in str(problem) for problem in verify(small))
    finally:
        path.write_bytes(before)


def test_packs_that_are_missing_or_too_short_are_found_before_anything_is_read(tmp_path):
    store, teachers = made_store(tmp_path, 1)
    store.add("tuned", SHARD, finetuned(teachers["t0"], 0.01, seed=3).items(), base="t0")
    base = store.open("t0", SHARD)
    (pack,) = {base.pack_path(extent) for extent in base.manifest.extents.values()}
    size = pack.stat().st_size
    for name in ("t0", "tuned"):
        os.truncate(pack, size - 4096)
        with pytest.raises(CorruptTeacherError, match=f"t0: {pack} ends at byte {size - 4096}, and has to have {size}"):
            TierManager(store, SHARD, "cpu", 1 << 23, 1 << 21, teachers=[name])
        os.truncate(pack, size)
    pack.unlink()
    with pytest.raises(MissingTeacherError, match=f"teacher t0: {pack} is missing"):
        TierManager(store, SHARD, "cpu", 1 << 23, 1 << 21, teachers=["tuned"])


def test_a_missing_pack_names_teacher_and_file(tmp_path):
    store, _ = made_store(tmp_path, 1)
    (pack,) = store.packs.glob("*.pack")
    pack.unlink()
    with pytest.raises(MissingTeacherError, match=f"teacher t0: .*{pack.name} is missing"):
        loaded(store, "t0")
    assert [problem.teacher for problem in verify(store)] == ["t0"]


IMPORT = """
import sys, torch
from teachers.store import TeacherStore
def tensors():
    for i in range(1000):
        yield f"w{i}", torch.full((1 << 18,), float(i))
        print(i, flush=True)
TeacherStore(sys.argv[1]).add("killed", "r0", tensors())
print("done", flush=True)
"""


@pytest.mark.parametrize("after", [0, 3, 40])
def test_an_import_that_is_killed_leaves_no_teacher_and_gc_frees_it(tmp_path, after):
    store, teachers = made_store(tmp_path, 1)
    process = subprocess.Popen([sys.executable, "-c", IMPORT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.strip() == str(after):
            break
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert store.names() == ("t0",)
    (problem,) = verify(store)
    assert problem.path.suffix == ".partial"
    assert gc(store).files == 1
    assert verify(store) == []
    assert_same(loaded(store, "t0"), teachers["t0"])


FULL = """
import resource, sys, torch
from teachers.errors import ImportFailedError
from teachers.store import TeacherStore
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    TeacherStore(sys.argv[1]).add("large", "r0", ((f"w{i}", torch.randn(1 << 17)) for i in range(9)))
except ImportFailedError as error:
    print(error)
"""


def test_a_disk_that_fills_names_the_teacher_and_harms_nothing(tmp_path):
    """The kernel refuses the write: by a limit on the file's size, since a test can't fill a disk."""
    store, teachers = made_store(tmp_path, 1)
    said = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert "teacher large, shard r0" in said.stdout, said.stderr
    assert ".pack: File too large" in said.stdout
    assert store.names() == ("t0",)
    assert verify(store) == []
    assert_same(loaded(store, "t0"), teachers["t0"])


def test_gc_frees_parts_of_packs_and_keeps_what_others_share(tmp_path):
    store, teachers = made_store(tmp_path, 1, width=256)
    other = {"head.weight": teachers["t0"]["head.weight"], "own": torch.randn(4096)}
    store.add("other", SHARD, other.items())
    store.remove("t0")
    freed = gc(store)
    assert freed.files == 0
    assert freed.holes > 100_000 or freed.kept > 100_000
    assert verify(store) == []
    assert_same(loaded(store, "other"), other)
    store.remove("other")
    assert gc(store).files == 2
    assert list(store.packs.iterdir()) == []


def test_what_can_t_be_imported_is_refused_by_name(tmp_path):
    store, teachers = made_store(tmp_path, 1)
    store.add("tuned", SHARD, finetuned(teachers["t0"], 0.1, 1).items(), base="t0")
    with pytest.raises(ImportFailedError, match="teacher t0 has shard"):
        store.add("t0", SHARD, {}.items())
    with pytest.raises(ImportFailedError, match="its base tuned is kept as a delta"):
        store.add("more", SHARD, {}.items(), base="tuned")
    with pytest.raises(ImportFailedError, match="tensor w was given twice"):
        store.add("twice", SHARD, [("w", torch.ones(2)), ("w", torch.ones(2))])
    with pytest.raises(ImportFailedError, match=r"not '\.\./up'"):
        store.add("../up", SHARD, {}.items())
    with pytest.raises(TeacherError, match="teacher t0 is the base of tuned"):
        store.remove("t0")
    with pytest.raises(TeacherError, match="teacher t0 is the base of tuned"):
        store.add("t0", SHARD, {}.items(), replace=True)
    with pytest.raises(MissingTeacherError, match="no teacher none with shard"):
        store.open("none", SHARD)
    assert store.names() == ("t0", "tuned")


def test_notes_are_added_to_a_shard_and_its_weights_stay(tmp_path):
    store, teachers = made_store(tmp_path, 2)
    store.add("tuned", SHARD, finetuned(teachers["t0"], 0.1, 1).items(), {"from": "t0"}, base="t0")
    store.annotate("tuned", SHARD, {"seen": 3})
    assert store.open("tuned", SHARD).meta == {"from": "t0", "seen": 3}
    assert_same(loaded(store, "tuned"), finetuned(teachers["t0"], 0.1, 1))
    with pytest.raises(TeacherError, match="teacher t0 is the base of tuned"):
        store.annotate("t0", SHARD, {"seen": 3})  # whose deltas know it by its manifest
    with pytest.raises(MissingTeacherError, match="no teacher t1 with shard other"):
        store.annotate("t1", "other", {})
    assert verify(store) == []


def test_a_shard_is_forgotten_alone_unless_it_is_a_base(tmp_path):
    store, teachers = made_store(tmp_path, 1)
    store.add("t0", "tp1of2", {"only": torch.arange(5)}.items())
    store.add("tuned", SHARD, finetuned(teachers["t0"], 0.1, 1).items(), base="t0")
    with pytest.raises(TeacherError, match="teacher t0 is the base of tuned"):
        store.forget("t0", SHARD)
    store.forget("t0", "tp1of2")
    store.forget("t0", "tp1of2")  # it is gone already
    assert store.shards("t0") == (SHARD,)
    store.forget("tuned", SHARD)
    assert store.names() == ("t0",)
    assert gc(store).files == 2
    assert verify(store) == []


def test_gc_that_does_not_wait_says_that_an_import_runs(tmp_path):
    store, _ = made_store(tmp_path, 1)

    def during():
        yield "a", torch.ones(3)
        with pytest.raises(TeacherError, match="is being imported to just now"):
            gc(store, wait=False)

    store.add("new", SHARD, during())
    assert gc(store, wait=False).files == 0


def test_a_base_that_is_replaced_or_removed_meanwhile_is_not_one(tmp_path):
    store, teachers = made_store(tmp_path, 1)
    tuned = finetuned(teachers["t0"], 0.01, seed=3)

    def replacing():
        for index, item in enumerate(tuned.items()):
            if index == 3:
                store.add("t0", SHARD, weights(7).items(), replace=True)
            yield item

    with pytest.raises(ImportFailedError, match=r"teacher tuned, shard .*: its base t0 was replaced meanwhile"):
        store.add("tuned", SHARD, replacing(), base="t0")
    assert store.names() == ("t0",)
    gc(store)
    assert verify(store) == []

    started = threading.Event()
    with ThreadPoolExecutor(1) as pool, store.exclusively():

        def add():
            started.set()
            return store.add("tuned", SHARD, tuned.items(), base="t0")

        adding = pool.submit(add)
        assert started.wait(60)
        time.sleep(0.2)  # it waits for the lock, and has looked at nothing yet
        (path,) = (store.teachers / "t0").iterdir()
        path.unlink()
        path.parent.rmdir()
    with pytest.raises(MissingTeacherError, match="no teacher t0 with shard"):
        adding.result(60)


def test_imports_of_several_ranks_run_side_by_side(tmp_path):
    code = (
        "import sys, torch; from teachers.store import TeacherStore;"
        "TeacherStore(sys.argv[1]).add('t', sys.argv[2], ((f'w{i}', torch.full((999,), i * 1.5)) for i in range(50)))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"tp{r}of2"]) for r in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    store = TeacherStore(tmp_path)
    assert store.shards("t") == ("tp0of2", "tp1of2")
    assert verify(store) == []


def test_a_read_does_not_wait_for_an_import_that_runs(tmp_path):
    store, teachers = made_store(tmp_path, 1)

    def slow():
        yield "a", torch.ones(3)
        started = time.monotonic()
        assert_same(loaded(store, "t0"), teachers["t0"])
        assert time.monotonic() - started < 60
        yield "b", torch.ones(4)

    store.add("during", SHARD, slow())
    assert store.names() == ("during", "t0")


def test_a_manifest_that_another_rank_removes_meanwhile_is_passed_over(tmp_path):
    store, _ = made_store(tmp_path, 3)
    walk = store.manifests()
    found = [next(walk)[1].teacher]
    TeacherStore(tmp_path).forget("t1", SHARD)
    assert found + [manifest.teacher for _, manifest in walk] == ["t0", "t2"]
