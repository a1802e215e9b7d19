"""Weights between Hugging Face directories and this rank's part of the Megatron model, bit for bit.

``weights_of`` lists every tensor of the whole model; ``rl.trainer.weight_forms`` says how each is made and cut. A rank
reads and holds its own part alone, one tensor at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import ParallelConfig
from rl.trainer.directories import finish_partial, fsync_tree, start_partial

platform.install()

from megatron.core import parallel_state  # noqa: E402  (needs the platform)

from rl.trainer.families.registry import family_of  # noqa: E402
from rl.trainer.model import Trunk  # noqa: E402
from rl.trainer.value import ValueModel  # noqa: E402
from rl.trainer.weight_forms import AXIS, Form, Weight, copied  # noqa: E402

TOKENIZER_PATTERNS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    "generation_config.json",
)
SHARD_BYTES = 4 * 2**30
DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which the config determines."""
VALUE_HEAD = "value_head.weight"
"""Name of a value model's head in a Hugging Face directory."""


class WeightMismatchError(ValueError):
    """A tensor is missing, unknown, or of another shape than the config says."""


def weights_of(hf: PretrainedConfig, parallel: ParallelConfig, value: bool = False) -> list[Weight]:
    """Every tensor of the model, in the order of the forward pass.

    Args:
        value: the model ends in a value head instead of the output projection.
    """
    hidden, vocabulary = hf.hidden_size, hf.vocab_size
    padded = -(-vocabulary // parallel.tensor) * parallel.tensor
    table = {"model.embed_tokens.weight": (vocabulary, hidden)}
    embedding = Weight("embedding.word_embeddings.weight", table, Form.VOCABULARY, (padded, hidden))
    weights = [embedding]
    for layer in range(hf.num_hidden_layers):
        weights += _layer_weights(hf, layer, hf.num_hidden_layers // parallel.stages)
    last = parallel.stages - 1
    norm = copied("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    weights.append(norm.placed("", "", last))
    if value:
        head = copied("value_head.weight", VALUE_HEAD, 1, hidden)
        weights.append(head.placed("", "", last))
    elif not hf.tie_word_embeddings:
        rows = {"lm_head.weight": (vocabulary, hidden)}
        weights.append(Weight("output_layer.weight", rows, Form.VOCABULARY, embedding.whole, last))
    elif parallel.pipeline > 1:
        shape = embedding.whole
        weights.append(Weight("output_layer.weight", table, Form.VOCABULARY, shape, last, exported=False))
    return weights


def _layer_weights(hf: PretrainedConfig, layer: int, layers_per_stage: int) -> list[Weight]:
    family, hidden = family_of(hf), hf.hidden_size
    weights = [
        copied("input_layernorm.weight", "input_layernorm.weight", hidden),
        *family.attention_weights(hf, layer),
        copied("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        *family.mlp_weights(hf, layer),
    ]
    target, source = f"decoder.layers.{layer % layers_per_stage}.", f"model.layers.{layer}."
    return [weight.placed(target, source, layer // layers_per_stage) for weight in weights]


@dataclass(frozen=True)
class _Place:
    """Which part of each weight this rank has."""

    stage: int
    tensor: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup
    expert: dist.ProcessGroup
    experts: int
    """That one rank has of each layer; 0 in a model without."""

    @classmethod
    def of(cls, model: Trunk) -> _Place:
        expert = parallel_state.get_expert_model_parallel_group()
        return cls(
            stage=model.stage,
            tensor=parallel_state.get_tensor_model_parallel_group(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
            expert=expert,
            experts=(model.config.num_moe_experts or 0) // expert.size(),
        )

    def has(self, weight: Weight) -> bool:
        return weight.stage == self.stage and (weight.expert is None or self.owner(weight.expert) == self.expert.rank())

    def owner(self, expert: int) -> int:
        """Rank in the expert-parallel group that has this expert."""
        return expert // self.experts

    def name(self, weight: Weight) -> str:
        """Its name on the rank that has it."""
        if weight.expert is None:
            return weight.megatron
        return weight.megatron.replace(f".{weight.expert}.linear", f".{weight.expert % self.experts}.linear")

    def pieces(self, weight: Weight) -> dist.ProcessGroup:
        """The ranks that have the pieces of this weight."""
        return self.tensor if weight.expert is None else self.expert_tensor


def rank_state(model: Trunk) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank, without what Transformer Engine keeps beside them."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{directory} has no *.safetensors file")
    files: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))
    return files


@torch.no_grad()
def load_hf(model: Trunk, hf: PretrainedConfig, directory: Path) -> None:
    """Fill this rank's tensors from a Hugging Face directory; the dtype becomes the model's. Raises like
    ``read_weights``."""
    state = rank_state(model)
    for name, piece in read_weights(model, hf, directory):
        state[name].copy_(piece)


def read_weights(model: Trunk, hf: PretrainedConfig, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors of a Hugging Face directory, each with its name in the model and in its shape there; on the
    CPU, in the directory's dtype, one at a time.

    A value model takes a policy's directory, and then starts with a head of zeros. Layers that predict more than one
    token ahead (beyond ``num_hidden_layers``) are not trained and not read; ``save_hf`` copies them.

    Raises:
        WeightMismatchError: names every tensor that is missing or unknown, or the one whose shape differs.
    """
    place, value = _Place.of(model), isinstance(model, ValueModel)
    weights = weights_of(hf, model.parallel, value)
    files = _files_by_tensor(directory)
    expected = {name for weight in weights for name in weight.hf}
    optional = {VALUE_HEAD} if value else set()
    allowed = {"lm_head.weight"} if value or hf.tie_word_embeddings else set()
    unknown = sorted(n for n in files.keys() - expected - allowed if not _left_out(n, hf))
    missing = sorted(expected - files.keys() - optional)
    if unknown or missing:
        raise WeightMismatchError(f"{directory}: missing tensors {missing}, unknown tensors {unknown}")

    shapes = {name: tensor.shape for name, tensor in rank_state(model).items()}
    mine = {place.name(weight): weight for weight in weights if place.has(weight)}
    if shapes.keys() != mine.keys():
        different = sorted(shapes.keys() ^ mine.keys())
        raise WeightMismatchError(f"{directory}: these parameters have no counterpart: {different}")
    for name, weight in mine.items():
        if optional & weight.hf.keys() - files.keys():
            yield name, torch.zeros(shapes[name])
            continue
        tensors = [_read(files[source], source, shape) for source, shape in weight.hf.items()]
        group = place.pieces(weight)
        piece = weight.piece(weight.fuse(tensors), group.rank(), group.size())
        yield name, piece.reshape(shapes[name])


def _left_out(name: str, hf: PretrainedConfig) -> bool:
    """Whether a directory may have this tensor without the model needing it."""
    return name.endswith(DERIVED_SUFFIX) or _predicts_ahead(name, hf)


def _predicts_ahead(name: str, hf: PretrainedConfig) -> bool:
    predictors = getattr(hf, "num_nextn_predict_layers", 0) or 0
    return name.startswith(tuple(f"model.layers.{hf.num_hidden_layers + index}." for index in range(predictors)))


def untrained_weights(hf: PretrainedConfig, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face directory that belong to the model but not to what is trained: its layers that
    predict further ahead. On the CPU, in the directory's dtype."""
    for name, path in sorted(_files_by_tensor(directory).items()):
        if _predicts_ahead(name, hf):
            with safe_open(path, framework="pt") as opened:
                yield name, opened.get_tensor(name)


def _read(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        found = tuple(opened.get_slice(name).get_shape())
        if found != shape:
            raise WeightMismatchError(f"{path}: {name} has shape {list(found)}, the config asks for {list(shape)}")
        return opened.get_tensor(name)


@torch.no_grad()
def export_weights(models: Sequence[Trunk], hf: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of the model, on this rank's device and in the model's dtype.

    Args:
        models: this rank's stages.

    A collective of all ranks: each must take the iterator to its end, and each gets every tensor. One Megatron tensor
    exists in whole at a time.
    """
    model, places = models[-1], {model.stage: (_Place.of(model), rank_state(model)) for model in models}
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    for weight in weights_of(hf, model.parallel, isinstance(model, ValueModel)):
        if not weight.exported:
            continue
        place, state = places.get(weight.stage, places[model.stage])
        group = place.pieces(weight)
        shape = weight.piece_shape(group.size())
        if place.has(weight):
            piece = state[place.name(weight)].detach().reshape(shape)
        else:
            dtype = torch.float32 if weight.float32 else model.config.params_dtype
            piece = torch.empty(shape, dtype=dtype, device=platform.device())
        if weight.expert is not None and place.expert.size() > 1 and weight.stage == place.stage:
            piece = _broadcast(piece, place.owner(weight.expert), place.expert)
        if pipeline.size() > 1:
            piece = _broadcast(piece, weight.stage % pipeline.size(), pipeline)
        axis = AXIS[weight.form]
        if axis is not None and group.size() > 1:
            pieces = [torch.empty_like(piece) for _ in range(group.size())]
            dist.all_gather(pieces, piece.contiguous(), group=group)
            piece = torch.cat(pieces, dim=axis)
        yield from weight.split(piece)


def _broadcast(piece: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    piece = piece.clone()  # the sender's may be the parameter itself
    dist.broadcast(piece, dist.get_global_rank(group, rank), group=group)
    return piece


def save_hf(weights: Iterable[tuple[str, Tensor]], source: Path, target: Path, dtype: str) -> None:
    """Write a Hugging Face directory: the weights, ``source``'s config with this dtype, and its tokenizer files.

    ``target`` appears whole or not at all.

    Raises:
        FileExistsError: ``target`` exists.
    """
    partial = start_partial(target)
    index: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    shards = total = size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            save_file(shard, partial / f"{shards}.safetensors", metadata={"format": "pt"})
            shards, shard, size = shards + 1, {}, 0
        # A copy: the tensor may be the parameter itself, and safetensors refuses shared memory.
        shard[name] = tensor.detach().to("cpu", copy=True)
        index[name] = shards
        size += tensor.nbytes
        total += tensor.nbytes
    save_file(shard, partial / f"{shards}.safetensors", metadata={"format": "pt"})
    _name_shards(partial, index, shards + 1, total)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (partial / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    for path in sorted({path for pattern in TOKENIZER_PATTERNS for path in source.glob(pattern)}):
        copy = shutil.copytree if path.is_dir() else shutil.copyfile
        copy(path, partial / path.name)
    fsync_tree(partial)
    finish_partial(target)


def _name_shards(directory: Path, index: dict[str, int], shards: int, total: int) -> None:
    if shards == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        (directory / f"{number}.safetensors").rename(directory / name)
    listing = {
        "metadata": {"total_size": total},
        "weight_map": {tensor: names[number] for tensor, number in index.items()},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")
