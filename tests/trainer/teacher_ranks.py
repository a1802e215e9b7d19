"""What each of two ranks does, one layout with teachers after another (``launched.run_ranks``)."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from algorithms import opd
from rl.teachers.sources import resolve
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer.collective import gather_objects
from rl.trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from rl.trainer.worker import TrainerWorker
from teachers.store import TeacherStore
from tests.trainer.common import capture_update, make_trajectories

LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pipeline=2),
    "data": ParallelConfig(),
    "context": ParallelConfig(context=2),
}
EXPERTS = "experts"
"""The case of a teacher whose experts are divided among the ranks."""
DAMAGED = {"damaged, tensor": ParallelConfig(tensor=2), "damaged, pipeline": ParallelConfig(pipeline=2)}
"""Cases of a teacher that streams, a file of which is damaged on rank 1 alone."""
CASES = (*LAYOUTS, EXPERTS, *DAMAGED)
MODES = {"sampled": {}, "full_vocab": {}, "top_k": {"top_k": 5}}
TEACHERS = ("ann", "bob")


def go_through(worker, models, store):
    """For each mode an update's result and gradient, from the student's first weights."""
    sources = [resolve(name, models / name) for name in TEACHERS]
    size = max(source.parameters for source in sources) * 4 * 3 // 2
    trajectories = make_trajectories(temperature=0.7)
    shares = [{TEACHERS[t.group_id % 2]: 1.0} if t.group_id < 3 else {"ann": 1.0, "bob": 2.0} for t in trajectories]
    teaching, found = Teaching(shares, ahead={"bob": 3}), {}
    for mode, options in MODES.items():
        worker.load_model(models / "student")
        worker.load_teachers(TeacherSetup(sources, str(store), hbm_bytes=size, pinned_bytes=8 * size))
        algorithm = opd.build(opd.Config(mode=mode, bound_low=0.0, bound_high=1e9, **options))
        found[mode] = capture_taught(worker, trajectories, algorithm, teaching)
    return found


def measure_fp8(worker, models, store):
    """The metrics of two updates with a teacher in fp8; the first finds out what that does."""
    worker.load_model(models / "student")
    source = replace(resolve("ann", models / "ann"), codec="fp8")
    worker.load_teachers(TeacherSetup([source], str(store), hbm_bytes=2**24, pinned_bytes=2**24))
    trajectories = make_trajectories(temperature=0.7)
    algorithm, teaching = opd.build(opd.Config()), Teaching([{"ann": 1.0}] * len(trajectories))
    return [worker.update(trajectories, 0, algorithm, (), teaching).metrics for _ in range(2)]


def capture_taught(worker, trajectories, algorithm, teaching):
    """``capture_update`` with teachers."""
    update = worker.update
    worker.update = lambda t, version, a, dropped: update(t, version, a, dropped, teaching)
    try:
        return capture_update(worker, trajectories, algorithm)
    finally:
        del worker.update


def import_experts(worker, models, store):
    source = resolve("moe", models / "moe")
    worker.load_model(models / "moe")
    worker.load_teachers(TeacherSetup([source], str(store), hbm_bytes=2**24, pinned_bytes=2**24))
    trajectories = make_trajectories(temperature=0.7)
    return worker.update(trajectories, 0, opd.build(opd.Config()), (), Teaching([{"moe": 1.0}] * len(trajectories)))


def meet_damage(worker, models, store, rank):
    """By whether the teacher is read whole before its turn, or layer after layer in it: what every rank raised, whether
    its weights are what they were, and what the same update says once the file is whole again."""
    found = {}
    for whole in (True, False):
        worker.load_model(models / "student")
        sources = [resolve(name, models / name) for name in TEACHERS]
        worker.load_teachers(TeacherSetup(sources, str(store), hbm_bytes=2**24, pinned_bytes=2**24))
        shard = TeacherStore(store).open("bob", worker._teachers._part.shard)
        hbm_bytes = 2 * max(shard.place(group.tensors)[1] for group in shard.groups)
        pinned_bytes = 2**24 if whole else shard.stored_bytes // 2
        name = max((n for n in shard.names if "layers.1." in n), key=lambda n: shard.tensors[n].nbytes)
        damaged = (shard.pack_path(shard.extent_of(name)[1]), shard.extent_of(name)[1].offset + 100)
        # Of all ranks the least, so that each has the same settings.
        hbm_bytes, pinned_bytes = (min(sizes) for sizes in zip(*gather_objects((hbm_bytes, pinned_bytes)), strict=True))
        worker.load_teachers(TeacherSetup(sources, str(store), hbm_bytes, pinned_bytes))
        assert worker._teachers._streaming == set(TEACHERS)
        if rank == 1:
            flip(*damaged)
        dist.barrier()
        before = [p.detach().clone() for p in worker.loaded.model.parameters()]
        error = raised_by(partial(taught_by, worker, "bob"))
        same = all(torch.equal(a, b.detach()) for a, b in zip(before, worker.loaded.model.parameters(), strict=True))
        taught_by(worker, "ann")
        if rank == 1:
            flip(*damaged)
        dist.barrier()
        worker.load_model(models / "student")
        again = taught_by(worker, "bob").metrics["teacher/bob/kl"].value()
        found[whole] = {"file": gather_objects(damaged[0])[1], "ranks": gather_objects((error, same)), "kl": again}
    return found


def stream_on_one(worker, models, store, rank):
    """With a budget that is a byte short on rank 1 alone: which ranks have to stream, and what the update says."""
    worker.load_model(models / "student")
    shard = TeacherStore(store).open("bob", worker._teachers._part.shard)
    setup = TeacherSetup([resolve("bob", models / "bob")], str(store), shard.device_bytes - rank, pinned_bytes=2**24)
    worker.load_teachers(setup)
    streams = gather_objects(worker._teachers._tiers.streams("bob"))
    return {"streams": streams, "kl": taught_by(worker, "bob").metrics["teacher/bob/kl"].value()}


def taught_by(worker, name):
    trajectories = make_trajectories(temperature=0.7)
    worker.config = worker.config.model_copy(update={"max_tokens_per_micro_batch": 20})  # several passes
    return worker.update(trajectories, 0, opd.build(opd.Config()), (), Teaching([{name: 1.0}] * len(trajectories)))


def raised_by(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001  (the test looks what it is)
        return error
    return None


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def main(rank, world, ports, models, output):
    cases = {**LAYOUTS, EXPERTS: ParallelConfig(expert=2), **DAMAGED}
    for (name, parallel), port in zip(cases.items(), ports, strict=True):
        config = TrainerConfig(
            parallel=parallel,
            world_size=world,
            optimizer=OptimizerConfig(lr=1e-3),
            max_tokens_per_micro_batch=100,
            timeout_s=60,
        )
        worker = TrainerWorker(config, rank, world, "127.0.0.1", port)
        if name == EXPERTS:
            found = import_experts(worker, models, output / "store")
        elif name in DAMAGED:
            found = meet_damage(worker, models, output / "damaged", rank)
            found["uneven"] = stream_on_one(worker, models, output / "damaged", rank)
        else:
            found = go_through(worker, models, output / "store")
            found["fp8"] = measure_fp8(worker, models, output / "fp8")
        if rank == 0:
            torch.save(found, output / f"{name}.pt")
        worker.close()
