"""Teachers in the trainer: what they say equals Hugging Face's forward of their own weights after every switch, the
student is never touched, and the objectives that are built on it have the values and slopes that they must have."""

import dataclasses
import resource
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithms import opd
from rl.fresh_model import FreshModel, create_model
from rl.teachers.sources import resolve
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer.result import MissingInputError
from teachers.errors import ImportFailedError, TeacherError, TierFullError
from teachers.store import TeacherStore
from teachers.upkeep import verify
from tests.trainer.common import Ratio, capture_update, make_trajectories
from tests.trainer.models import hf_logprobs

NAMES = ("ann", "bob", "cyd")
SHAPE = {"kv_heads": 2, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """HF directories: two of the student's architecture, one of another with the same tokenizer."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(NAMES, start=1):
        layers = 2 if name == "cyd" else 4
        create_model(folder / name, FreshModel(layers=layers, **SHAPE), seed=seed)
    return {name: folder / name for name in NAMES}


@pytest.fixture
def taught(worker, teachers, tmp_path):
    """The rank with room for one teacher at a time, so that each use is a switch."""
    sources = [resolve(name, path) for name, path in teachers.items()]
    size = max(source.parameters for source in sources) * 4 * 5 // 4
    worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), hbm_bytes=size, pinned_bytes=2 * size))
    return worker


def teaching_of(trajectories):
    """Each group's own teacher; the last group has two."""
    own = [{NAMES[t.group_id]: 1.0} if t.group_id < 3 else {"ann": 1.0, "cyd": 3.0} for t in trajectories]
    return Teaching(own)


def hf(path, trajectories):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return [x.numpy() for x in hf_logprobs(model, trajectories)]


class Spy(opd.OPD):
    """Keeps what it is given."""

    def prepare(self, batch):
        self.batch = batch
        return super().prepare(batch)


def make(**options):
    return Spy(opd.Config(aggregation="token_mean", **options))


def test_log_probs_are_hugging_faces_after_every_switch_and_the_student_stays_bit_for_bit(taught, teachers):
    trajectories = make_trajectories(temperature=0.7)
    expected = {name: hf(path, trajectories) for name, path in teachers.items()}
    before = {name: p.detach().clone() for name, p in taught.loaded.model.named_parameters()}
    algorithm, teaching = make(), teaching_of(trajectories)
    batch_shares = teaching.shares
    for _ in range(2):
        scored = taught._score(trajectories, build(trajectories), algorithm, teaching)
        parts = np.split(scored.logprobs.numpy(), np.cumsum([len(t) for t in trajectories])[:-1])
        for index, (t, found) in enumerate(zip(trajectories, parts, strict=True)):
            total = sum(batch_shares[index].values())
            wanted = sum(w / total * expected[name][index] for name, w in batch_shares[index].items())
            assert np.abs(found - wanted)[t.action_mask].max() <= 1e-5
    after = dict(taught.loaded.model.named_parameters())
    assert all(torch.equal(before[name], after[name].detach()) for name in before)
    assert scored.metrics["teacher/ann/prompts"].value() == 6


@pytest.mark.parametrize("mode", ["sampled", "full_vocab"])
def test_teachers_larger_than_their_memory_stream_layer_by_layer(worker, teachers, tmp_path, mode):
    sources = [resolve(name, path) for name, path in teachers.items()]
    trajectories = make_trajectories(temperature=0.7)
    teaching, results = teaching_of(trajectories), []
    for hbm_bytes in (380_000, 2**24):  # two layers, or all teachers
        worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), hbm_bytes, 2**24))
        batch = build(trajectories)
        worker.config = worker.config.model_copy(update={"max_tokens_per_micro_batch": 20})  # several passes
        results.append(worker._score(trajectories, batch, make(mode=mode), teaching))
        assert bool(worker._teachers._streaming) == (hbm_bytes < 2**20)
    streamed, whole = results
    assert (streamed.logprobs - whole.logprobs).abs().max() <= 1e-5
    if streamed.views is not None:
        for found, wanted in zip(streamed.views.scores, whole.views.scores, strict=True):
            assert torch.equal(found.head, wanted.head)
            assert (found.hidden - wanted.hidden).abs().max() <= 1e-4


def test_one_that_streams_is_read_into_pinned_memory_before_its_turn(worker, teachers, tmp_path):
    sources = [resolve(name, teachers[name]) for name in ("ann", "bob")]
    worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), 380_000, 2**24))
    worker.prefetch_teachers({"bob": 1})
    tiers = worker._teachers._tiers
    deadline = time.monotonic() + 60
    while "bob" not in tiers.in_pinned:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trajectories = make_trajectories()
    scored = worker._score(trajectories, build(trajectories), make(), Teaching([{"bob": 1.0}] * len(trajectories)))
    assert scored.metrics["teacher/bob/pinned_hits"].value() == 1
    assert scored.metrics["teacher/bob/hbm_hits"].value() == 0


@contextmanager
def full_disk():
    """The kernel refuses to write more: by a limit on a file's size, since a test can't fill a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_while_a_run_imports_names_the_teacher_and_the_file_and_harms_nothing(
    worker, teachers, tmp_path
):
    setup = TeacherSetup([resolve("ann", teachers["ann"])], str(tmp_path / "store"), 2**24, 2**24)
    before = {name: p.detach().clone() for name, p in worker.loaded.model.named_parameters()}
    with full_disk(), pytest.raises(ImportFailedError, match=r"teacher ann, shard .*\.pack: File too large"):
        worker.load_teachers(setup)
    assert verify(TeacherStore(setup.store)) == []
    assert all(torch.equal(before[name], p.detach()) for name, p in worker.loaded.model.named_parameters())
    worker.load_teachers(setup)
    trajectories = make_trajectories()
    worker.update(trajectories, 0, make(), teaching=Teaching([{"ann": 1.0}] * len(trajectories)))


def test_memory_for_less_than_two_layers_is_refused_by_name(worker, teachers, tmp_path):
    sources, before = [resolve(name, path) for name, path in teachers.items()], set(threading.enumerate())
    with pytest.raises(TierFullError, match=r"teacher ann streams .* distillation\.hbm_bytes=300000"):
        worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), 300_000, 2**24))
    assert not set(threading.enumerate()) - before, "tiers left open"


def build(trajectories):
    from rl.batch import build_batch

    return build_batch(trajectories, 0)


def test_a_student_that_is_its_own_teacher_has_no_advantage_and_no_gradient(worker, model_dir, tmp_path):
    source = resolve("self", model_dir)
    worker.load_teachers(TeacherSetup([source], str(tmp_path / "store"), 2**24, 2**24))
    trajectories = make_trajectories(temperature=0.7)
    trajectories = [
        t.replace(rollout_logprobs=np.where(t.action_mask, p, 0).astype(np.float32))
        for t, p in zip(trajectories, worker.logprobs(trajectories), strict=True)
    ]
    teaching = Teaching([{"self": 1.0}] * len(trajectories))
    for mode in ("sampled", "full_vocab", "top_k"):
        worker.load_model(model_dir)  # Adam makes steps even of rounding errors
        _, gradient = capture(worker, trajectories, make(mode=mode, top_k=5), teaching)
        assert max(float(g.abs().max()) for g in gradient.values()) < 2e-6, mode


def capture(worker, trajectories, algorithm, teaching):
    update = worker.update
    worker.update = lambda t, v, a, d: update(t, v, a, d, teaching)
    try:
        return capture_update(worker, trajectories, algorithm)
    finally:
        del worker.update


@pytest.mark.parametrize(("mode", "chunk"), [("full_vocab", 2048), ("full_vocab", 7), ("top_k", 7)])
def test_reverse_kl_over_the_vocabulary_equals_autograds(taught, teachers, model_dir, mode, chunk):
    trajectories = make_trajectories(temperature=0.7)
    teaching = teaching_of(trajectories)
    taught.config = taught.config.model_copy(update={"logits_chunk_tokens": chunk})
    result, gradient = capture(taught, trajectories, make(mode=mode, top_k=101 if mode == "top_k" else 32), teaching)

    student = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in teachers.items()}
    total, tokens = torch.zeros(()), sum(int(t.action_mask.sum()) for t in trajectories)
    for t, shares in zip(trajectories, teaching.shares, strict=True):
        ids = torch.from_numpy(t.token_ids).long()[None]
        rows = torch.from_numpy(t.action_mask[1:])
        logp = (student(ids).logits[0, :-1][rows] / t.temperature).log_softmax(-1)
        for name, share in shares.items():
            with torch.no_grad():
                logq = (models[name](ids).logits[0, :-1][rows] / t.temperature).log_softmax(-1)
            total = total + share / sum(shares.values()) * (logp.exp() * (logp - logq)).sum()
    loss = total / tokens
    loss.backward()
    assert result.loss == pytest.approx(float(loss), rel=1e-4)
    for name, parameter in student.named_parameters():
        if name in gradient:
            assert (gradient[name].cpu() - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), name


def test_a_checkpoint_teaches_like_the_directory_of_its_weights(worker, model_dir, tmp_path):
    trajectories = make_trajectories(temperature=0.7)
    worker.update(trajectories, 0, Ratio())
    worker.save_checkpoint(tmp_path / "step_000001", {"initial_model": str(model_dir)})
    expected = worker.logprobs(trajectories)
    source = resolve("earlier", tmp_path / "step_000001")
    worker.load_teachers(TeacherSetup([source], str(tmp_path / "store"), 2**24, 2**24))
    scored = worker._score(trajectories, build(trajectories), make(), Teaching([{"earlier": 1.0}] * len(trajectories)))
    parts = np.split(scored.logprobs.numpy(), np.cumsum([len(t) for t in trajectories])[:-1])
    for t, found, wanted in zip(trajectories, parts, expected, strict=True):
        assert np.abs(found - wanted)[t.action_mask].max() <= 1e-5


def test_a_store_is_used_again_until_the_source_changes(worker, teachers, tmp_path):
    sources = [resolve(name, path) for name, path in teachers.items()]
    setup = TeacherSetup(sources, str(tmp_path / "store"), 2**24, 2**24)
    worker.load_teachers(setup)
    assert worker._teachers.imported == list(NAMES)
    worker.load_teachers(setup)
    assert worker._teachers.imported == []
    changed = dataclasses.replace(sources[1], fingerprint="another")
    worker.load_teachers(dataclasses.replace(setup, sources=[sources[0], changed, sources[2]]))
    assert worker._teachers.imported == ["bob"]


def test_scores_from_elsewhere_count_like_those_of_a_teacher_here(taught, teachers):
    trajectories = make_trajectories()
    given = hf(teachers["bob"], trajectories)
    elsewhere = Teaching([{"far": 2.0}] * len(trajectories), {"far": given})
    here = Teaching([{"bob": 1.0}] * len(trajectories))
    found = [taught._score(trajectories, build(trajectories), make(), x).logprobs for x in (elsewhere, here)]
    mask = build(trajectories).rollout.action_mask
    assert (found[0] - found[1])[mask].abs().max() <= 1e-5


def test_a_damaged_file_is_named_and_the_other_teachers_go_on(worker, teachers, tmp_path):
    sources = [resolve(name, path) for name, path in teachers.items()]
    worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), 2**24, 2**24))
    store = TeacherStore(tmp_path / "store")
    (shard,) = store.shards("bob")
    extent = next(iter(store.open("bob", shard).manifest.extents.values()))
    pack = tmp_path / "store" / "packs" / f"{extent.pack}.pack"
    with pack.open("r+b") as file:
        file.seek(extent.offset + 100)
        byte = file.read(1)
        file.seek(extent.offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    worker.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), 2**24, 2**24))
    trajectories = make_trajectories()
    before = {name: p.detach().clone() for name, p in worker.loaded.model.named_parameters()}
    with pytest.raises(TeacherError, match=rf"bob.*{pack.name}"):
        worker.update(trajectories, 0, make(), teaching=Teaching([{"bob": 1.0}] * len(trajectories)))
    assert all(torch.equal(before[name], p.detach()) for name, p in worker.loaded.model.named_parameters())
    worker.update(trajectories, 0, make(), teaching=Teaching([{"ann": 1.0}] * len(trajectories)))


def test_teachers_that_are_needed_and_not_given_are_named(taught):
    trajectories = make_trajectories()
    with pytest.raises(MissingInputError, match="Spy needs teachers"):
        taught.update(trajectories, 0, make())
