"""Checkpoints that another layout can resume from, that are complete or absent, and that say what is wrong with them.

    DIRECTORY/manifest.json     step, layout, the caller's extra state, and each file's size and hash; written last
    DIRECTORY/*.distcp, ...     weights, main weights, Adam's moments and RNG states (Megatron's ``torch_dist`` format)

Everything is written into ``.DIRECTORY.partial``, forced to the disk, and renamed. All ranks take part, and all see the
same file system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from rl.trainer import platform
from rl.trainer.collective import gather_objects, on_rank_zero
from rl.trainer.config import TrainerConfig
from rl.trainer.directories import finish_partial, fsync_path, fsync_tree, partial_path, start_partial
from rl.trainer.manifest import FORMAT, MANIFEST, CheckpointError, read_manifest

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rl.trainer.model import PolicyModel
from rl.trainer.optimizer import Optimizer

HASH_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Restored:
    """What comes back beside the weights and the optimizer."""

    step: int
    extra: Mapping[str, Any]


class _InProcessSave(TorchDistSaveShardedStrategy):
    """The ``torch_dist`` format written by threads of this process. Megatron's own writer starts a manager process,
    which outlives the save and, spawned, would import the main module of whatever runs this (a Ray worker)."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=self.thread_count),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, can_run_decentralized_global_plan=False
            ),
        )


def _layout(config: TrainerConfig) -> dict[str, Any]:
    return {"world_size": config.world_size, "dtype": config.dtype, **config.parallel.model_dump()}


def _state(model: PolicyModel, optimizer: Optimizer, loading: bool, with_rng: bool) -> ShardedStateDict:
    weights = model.sharded_state_dict()
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, loading)}
    if with_rng:
        states = {"torch": torch.get_rng_state(), "model_parallel": get_cuda_rng_tracker().get_states()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        # One object for each rank: the states differ.
        state["rng"] = ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))
    return state


def save_checkpoint(
    directory: Path,
    model: PolicyModel,
    optimizer: Optimizer,
    step: int,
    extra: Mapping[str, Any],
    config: TrainerConfig,
) -> None:
    """Write a checkpoint. A collective of all ranks.

    Args:
        extra: JSON-able state of the caller; rank 0's is kept.

    Raises:
        FileExistsError: ``directory`` exists.
        TypeError: ``extra`` is not JSON-able; found before anything is written.
    """
    on_rank_zero(lambda: json.dumps(dict(extra)) and start_partial(directory))
    partial = partial_path(directory)
    state = _state(model, optimizer, loading=False, with_rng=True)
    dist_checkpointing.save(state, str(partial), sharded_strategy=_InProcessSave("torch_dist", 1))
    dist.barrier()
    files = _hash_files(partial, sorted(path.name for path in partial.iterdir()))
    manifest = {"format": FORMAT, "step": step, "layout": _layout(config), "extra": dict(extra), "files": files}

    def finish() -> None:
        fsync_tree(partial)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        fsync_path(partial / MANIFEST)
        fsync_path(partial)
        finish_partial(directory)

    on_rank_zero(finish)


def load_checkpoint(directory: Path, model: PolicyModel, optimizer: Optimizer, config: TrainerConfig) -> Restored:
    """Restore weights, optimizer and RNG states. A collective of all ranks.

    Another layout than the one that saved may load; it then keeps its own RNG states.

    Raises:
        CheckpointError: names each file that is missing, of another size, or changed, or the dtype that differs.
    """
    manifest = read_manifest(directory)
    _verify(directory, manifest["files"])
    layout = _layout(config)
    if manifest["layout"]["dtype"] != layout["dtype"]:
        raise CheckpointError(f"{directory} holds {manifest['layout']['dtype']} weights, not {layout['dtype']} ones")
    same_layout = manifest["layout"] == layout
    state = _state(model, optimizer, loading=True, with_rng=same_layout)
    loaded = dist_checkpointing.load(state, str(directory))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        torch.set_rng_state(loaded["rng"]["torch"])
        get_cuda_rng_tracker().set_states(loaded["rng"]["model_parallel"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded["rng"]["cuda"])
    return Restored(manifest["step"], manifest["extra"])


def _verify(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    present = [name for name in sorted(files) if (directory / name).is_file()]
    found = _hash_files(directory, present)
    problems = [f"{name} is missing" for name in sorted(files.keys() - set(present))]
    for name in present:
        if found[name]["bytes"] != files[name]["bytes"]:
            problems.append(f"{name} has {found[name]['bytes']} bytes, not {files[name]['bytes']}")
        elif found[name] != files[name]:
            problems.append(f"{name} has changed: its xxh3_128 is not the manifest's")
    if problems:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")


def _hash_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and hash of each file; the ranks share the work, and all get the result."""
    mine = names[dist.get_rank() :: dist.get_world_size()]
    parts = gather_objects({name: _hash_file(directory / name) for name in mine})
    return {name: entry for part in parts for name, entry in part.items()}


def _hash_file(path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as opened:
        while block := opened.read(HASH_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3_128": digest.hexdigest()}
