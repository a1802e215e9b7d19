"""Weights between Hugging Face directories and this rank's part of the Megatron model, bit for bit.

Each Megatron tensor is made of one or more Hugging Face tensors in a *whole* form of which tensor-parallel rank ``r``
holds the ``r``-th equal piece along one axis:

    copied       the tensor itself, no axis
    vocabulary   rows padded with zeros to a multiple of the ranks, axis 0
    qkv          [kv_heads, (queries per kv head + 2) · head_dim, hidden], axis 0
    gate_up      [2, intermediate, hidden], axis 1
    row          the tensor itself, axis 1
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.directories import finish_partial, fsync_tree, start_partial

platform.install()

from megatron.core import parallel_state  # noqa: E402  (needs the platform)

from rl.trainer.model import PolicyModel  # noqa: E402

TOKENIZER_PATTERNS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    "generation_config.json",
)
SHARD_BYTES = 4 * 2**30
DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which the config determines."""


class WeightMismatchError(ValueError):
    """A tensor is missing, unknown, or of another shape than the config says."""


class Form(StrEnum):
    COPIED = "copied"
    VOCABULARY = "vocabulary"
    QKV = "qkv"
    GATE_UP = "gate_up"
    ROW = "row"


AXIS = {Form.COPIED: None, Form.VOCABULARY: 0, Form.QKV: 0, Form.GATE_UP: 1, Form.ROW: 1}


@dataclass(frozen=True)
class Weight:
    """One Megatron tensor of the whole model and the Hugging Face tensors that it is made of."""

    megatron: str
    """Its name in the module of its stage."""
    stage: int
    hf: Mapping[str, tuple[int, ...]]
    """Names and shapes."""
    form: Form
    whole: tuple[int, ...]
    """Shape of the whole form."""
    exported: bool = True
    """False for the last stage's copy of a tied embedding."""

    def fuse(self, tensors: list[Tensor]) -> Tensor:
        """The whole form of the Hugging Face tensors, in their order."""
        match self.form:
            case Form.QKV:
                heads = self.whole[0]
                return torch.cat([t.view(heads, -1, self.whole[2]) for t in tensors], dim=1)
            case Form.GATE_UP:
                return torch.stack(tensors)
            case Form.VOCABULARY:
                padding = tensors[0].new_zeros(self.whole[0] - len(tensors[0]), self.whole[1])
                return torch.cat([tensors[0], padding])
            case Form.COPIED | Form.ROW:
                return tensors[0]

    def split(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors, each with its name."""
        shapes = list(self.hf.values())
        match self.form:
            case Form.QKV:
                heads, _, hidden = self.whole
                parts = whole.split([shape[0] // heads for shape in shapes], dim=1)
                tensors = [part.reshape(-1, hidden) for part in parts]
            case Form.GATE_UP:
                tensors = list(whole)
            case Form.VOCABULARY:
                tensors = [whole[: shapes[0][0]]]
            case Form.COPIED | Form.ROW:
                tensors = [whole]
        yield from zip(self.hf, (t.contiguous() for t in tensors), strict=True)

    def piece(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        axis = AXIS[self.form]
        return whole if axis is None else whole.chunk(ranks, dim=axis)[rank]

    def piece_shape(self, ranks: int) -> tuple[int, ...]:
        axis = AXIS[self.form]
        return tuple(size // ranks if dim == axis else size for dim, size in enumerate(self.whole))


def weights_of(hf: PretrainedConfig, tensor: int, pipeline: int) -> list[Weight]:
    """Every tensor of the model, in the order of the forward pass."""
    hidden, vocabulary = hf.hidden_size, hf.vocab_size
    padded = -(-vocabulary // tensor) * tensor
    table = {"model.embed_tokens.weight": (vocabulary, hidden)}
    embedding = Weight("embedding.word_embeddings.weight", 0, table, Form.VOCABULARY, (padded, hidden))
    weights = [embedding]
    for layer in range(hf.num_hidden_layers):
        weights += _layer_weights(hf, layer, hf.num_hidden_layers // pipeline)
    last = pipeline - 1
    norm = {"model.norm.weight": (hidden,)}
    weights.append(Weight("decoder.final_layernorm.weight", last, norm, Form.COPIED, (hidden,)))
    if not hf.tie_word_embeddings:
        head = {"lm_head.weight": (vocabulary, hidden)}
        weights.append(Weight("output_layer.weight", last, head, Form.VOCABULARY, embedding.whole))
    elif pipeline > 1:
        weights.append(Weight("output_layer.weight", last, table, Form.VOCABULARY, embedding.whole, exported=False))
    return weights


def _layer_weights(hf: PretrainedConfig, layer: int, layers_per_stage: int) -> list[Weight]:
    hidden, intermediate, head = hf.hidden_size, hf.intermediate_size, hf.head_dim
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    source = f"model.layers.{layer}."
    target = f"decoder.layers.{layer % layers_per_stage}."
    queries_per_head = heads // kv_heads
    qkv = {
        f"{source}self_attn.q_proj.weight": (heads * head, hidden),
        f"{source}self_attn.k_proj.weight": (kv_heads * head, hidden),
        f"{source}self_attn.v_proj.weight": (kv_heads * head, hidden),
    }
    gate_up = {
        f"{source}mlp.gate_proj.weight": (intermediate, hidden),
        f"{source}mlp.up_proj.weight": (intermediate, hidden),
    }

    def copied(megatron: str, name: str, size: int) -> Weight:
        return Weight(target + megatron, layer // layers_per_stage, {source + name: (size,)}, Form.COPIED, (size,))

    def stage(megatron: str, tensors: Mapping[str, tuple[int, ...]], form: Form, whole: tuple[int, ...]) -> Weight:
        return Weight(target + megatron, layer // layers_per_stage, tensors, form, whole)

    weights = [
        copied("input_layernorm.weight", "input_layernorm.weight", hidden),
        stage("self_attention.linear_qkv.weight", qkv, Form.QKV, (kv_heads, (queries_per_head + 2) * head, hidden)),
        stage(
            "self_attention.linear_proj.weight",
            {f"{source}self_attn.o_proj.weight": (hidden, heads * head)},
            Form.ROW,
            (hidden, heads * head),
        ),
        copied("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        stage("mlp.linear_fc1.weight", gate_up, Form.GATE_UP, (2, intermediate, hidden)),
        stage(
            "mlp.linear_fc2.weight",
            {f"{source}mlp.down_proj.weight": (hidden, intermediate)},
            Form.ROW,
            (hidden, intermediate),
        ),
    ]
    if hf.model_type == "qwen3":
        weights += [
            copied("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", head),
            copied("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", head),
        ]
    return weights


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
def load_hf(model: PolicyModel, hf: PretrainedConfig, directory: Path) -> None:
    """Fill this rank's parameters from a Hugging Face directory; the dtype becomes the model's.

    Raises:
        WeightMismatchError: names every tensor that is missing or unknown, or the one whose shape differs.
    """
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks, rank, stage = tensor.size(), tensor.rank(), pipeline.rank()
    weights = weights_of(hf, ranks, pipeline.size())
    files = _files_by_tensor(directory)
    expected = {name for weight in weights for name in weight.hf}
    allowed = {"lm_head.weight"} if hf.tie_word_embeddings else set()
    unknown = sorted(n for n in files.keys() - expected - allowed if not n.endswith(DERIVED_SUFFIX))
    missing = sorted(expected - files.keys())
    if unknown or missing:
        raise WeightMismatchError(f"{directory}: missing tensors {missing}, unknown tensors {unknown}")

    parameters = dict(model.named_parameters())
    mine = [weight for weight in weights if weight.stage == stage]
    if parameters.keys() != {weight.megatron for weight in mine}:
        different = sorted(parameters.keys() ^ {weight.megatron for weight in mine})
        raise WeightMismatchError(f"{directory}: these parameters have no counterpart: {different}")
    for weight in mine:
        tensors = [_read(files[name], name, shape) for name, shape in weight.hf.items()]
        parameter = parameters[weight.megatron]
        parameter.copy_(weight.piece(weight.fuse(tensors), rank, ranks).reshape(parameter.shape))


def _read(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        found = tuple(opened.get_slice(name).get_shape())
        if found != shape:
            raise WeightMismatchError(f"{path}: {name} has shape {list(found)}, the config asks for {list(shape)}")
        return opened.get_tensor(name)


@torch.no_grad()
def export_weights(model: PolicyModel, hf: PretrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor of the model, on this rank's device and in the model's dtype.

    A collective of the tensor- and pipeline-parallel ranks: each must take the iterator to its end, and each gets
    every tensor. One Megatron tensor exists in whole at a time.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks, stage = group.size(), pipeline.rank()
    parameters = dict(model.named_parameters())
    for weight in weights_of(hf, ranks, pipeline.size()):
        if not weight.exported:
            continue
        shape = weight.piece_shape(ranks)
        if weight.stage == stage:
            piece = parameters[weight.megatron].detach().reshape(shape)
        else:
            piece = torch.empty(shape, dtype=model.config.params_dtype, device=platform.device())
        if pipeline.size() > 1:
            piece = piece.clone()
            dist.broadcast(piece, dist.get_global_rank(pipeline, weight.stage), group=pipeline)
        axis = AXIS[weight.form]
        if axis is not None and ranks > 1:
            pieces = [torch.empty_like(piece) for _ in range(ranks)]
            dist.all_gather(pieces, piece.contiguous(), group=group)
            piece = torch.cat(pieces, dim=axis)
        yield from weight.split(piece)


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
