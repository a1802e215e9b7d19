"""Checkpoints that another layout can resume from, that are complete or absent, and that say what is wrong with them.

    DIRECTORY/manifest.json     step, layout, the caller's extra state, and each file's size and hash; written last
    DIRECTORY/*.distcp, ...     all ranks' pieces (``rl.trainer.checkpoint_pieces``) in PyTorch's distributed format
    DIRECTORY/rng_RANK.pt       the rank's RNG states

Everything is written into ``.DIRECTORY.partial``, forced to the disk, and renamed, so that a process that dies while
it saves leaves the last checkpoint as it was. All ranks take part, and all see the same file system.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from rl.trainer import platform
from rl.trainer.collective import on_every_rank, on_rank_zero
from rl.trainer.config import TrainerConfig
from rl.trainer.directories import finish_partial, fsync_path, fsync_tree, partial_path, start_partial
from rl.trainer.host_memory import HostMemory
from rl.trainer.manifest import FORMAT, MANIFEST, CheckpointError, read_manifest

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from rl.trainer.checkpoint_pieces import Piece, copied, state_pieces
from rl.trainer.checkpoint_planner import PieceLoadPlanner, PieceSavePlanner
from rl.trainer.model import PolicyModel
from rl.trainer.optimizer import Optimizer

HASH_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Restored:
    """What comes back beside the weights and the optimizer."""

    step: int
    extra: Mapping[str, Any]


class Checkpoints:
    """Saves and loads the state of one rank. Made, used and closed by all ranks together.

    It has a process group of its own (gloo), in which a save can go on in the background while the ranks compute.
    """

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: for which a rank waits for another one."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        directory: Path,
        models: Sequence[PolicyModel],
        optimizer: Optimizer,
        step: int,
        extra: Mapping[str, Any],
        config: TrainerConfig,
        background: bool = False,
    ) -> None:
        """Write a checkpoint.

        Args:
            extra: JSON-able state of the caller; rank 0's is kept.
            background: return once the state is copied to host memory; ``wait`` says how the rest went.

        Raises:
            FileExistsError: ``directory`` exists.
            TypeError: ``extra`` is not JSON-able; found before anything is written.
            Exception: an earlier save in the background failed, with this error.
        """
        self.wait()
        on_rank_zero(lambda: json.dumps(dict(extra)) and start_partial(directory), self._group)
        pieces = [piece for piece in state_pieces(models, optimizer) if piece.written]
        manifest = {
            "format": FORMAT,
            "step": step,
            "adam_steps": optimizer.adam_steps,
            "layout": _layout(config),
            "extra": dict(extra),
        }
        states = _rng_states()
        if not background:
            self._write(directory, pieces, states, manifest)
            return
        held = copied(pieces, self._memory.copies([piece.tensor for piece in pieces]))

        def write() -> None:
            try:
                self._write(directory, held, states, manifest)
            except BaseException as error:  # noqa: BLE001  (raised by ``wait``)
                self._failure = error

        self._thread = threading.Thread(target=write, name=f"save {directory.name}")
        self._thread.start()

    def wait(self) -> None:
        """Until the save in the background, if there is one, is on the disk.

        Raises:
            Exception: what the save failed with; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish what is being saved and free the host memory. Raises like ``wait``."""
        try:
            self.wait()
        finally:
            self._memory.close()

    def _write(self, directory: Path, pieces: Sequence[Piece], rng_states: bytes, manifest: Mapping[str, Any]) -> None:
        partial = partial_path(directory)
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(partial),
            planner=PieceSavePlanner(pieces),
            process_group=self._group,
        )
        on_every_rank(lambda: _rng_path(partial, dist.get_rank()).write_bytes(rng_states), self._group)
        files = self._hash_files(partial, sorted(path.name for path in partial.iterdir()))

        def finish() -> None:
            fsync_tree(partial)
            (partial / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1) + "\n")
            fsync_path(partial / MANIFEST)
            fsync_path(partial)
            finish_partial(directory)

        on_rank_zero(finish, self._group)

    def load(
        self, directory: Path, models: Sequence[PolicyModel], optimizer: Optimizer, config: TrainerConfig
    ) -> Restored:
        """Restore weights, optimizer and RNG states.

        Another layout than the one that saved may load; it then keeps its own RNG states.

        Raises:
            CheckpointError: names each file that is missing, of another size, or changed, the tensor that does not fit
                the model, or the dtype that differs.
        """
        self.wait()
        manifest, layout = read_manifest(directory), _layout(config)
        self._verify(directory, manifest["files"])
        if manifest["layout"]["dtype"] != layout["dtype"]:
            raise CheckpointError(
                f"{directory} holds {manifest['layout']['dtype']} weights, not {layout['dtype']} ones"
            )
        planner = PieceLoadPlanner(state_pieces(models, optimizer))
        try:
            with torch.no_grad():
                dcp.load({}, storage_reader=dcp.FileSystemReader(directory), planner=planner, process_group=self._group)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{directory} does not fit the model, says rank {rank}: {cause}") from error
        optimizer.set_adam_steps(manifest["adam_steps"])
        optimizer.publish()
        if manifest["layout"] == layout:
            _set_rng_states(_rng_path(directory, dist.get_rank()).read_bytes())
        return Restored(manifest["step"], manifest["extra"])

    def _verify(self, directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        present = [name for name in sorted(files) if (directory / name).is_file()]
        found = self._hash_files(directory, present)
        problems = [f"{name} is missing" for name in sorted(files.keys() - set(present))]
        for name in present:
            if found[name]["bytes"] != files[name]["bytes"]:
                problems.append(f"{name} has {found[name]['bytes']} bytes, not {files[name]['bytes']}")
            elif found[name] != files[name]:
                problems.append(f"{name} has changed: its xxh3_128 is not the manifest's")
        if problems:
            raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")

    def _hash_files(self, directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
        """Size and hash of each file; the ranks share the work, and all get the result."""
        mine = names[dist.get_rank() :: dist.get_world_size()]
        parts = on_every_rank(lambda: {name: _hash_file(directory / name) for name in mine}, self._group)
        return {name: entry for part in parts for name, entry in part.items()}


def _layout(config: TrainerConfig) -> dict[str, Any]:
    return {"world_size": config.world_size, "dtype": config.dtype, **config.parallel.model_dump()}


def _rng_path(directory: Path, rank: int) -> Path:
    return directory / f"rng_{rank:05d}.pt"


def _rng_states() -> bytes:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "model_parallel": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


def _set_rng_states(content: bytes) -> None:
    states = torch.load(io.BytesIO(content))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["model_parallel"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _hash_file(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as opened:
        while block := opened.read(HASH_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}
