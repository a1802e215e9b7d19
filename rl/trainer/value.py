"""A value model: the trunk of a language model, and a scalar from the last hidden state.

    V_t = w · h_{t−1}

stands at the position of token ``t``: it is what the state before token ``t`` is worth, from the hidden state that
predicts it. A token that is not scored has 0, as has a sample's first token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from transformers import PretrainedConfig

from rl.trainer import platform
from rl.trainer.config import TrainerConfig

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rl.trainer.head import to_tokens
from rl.trainer.model import INDEXER, Trunk, train_only
from rl.trainer.packing import Layout


class ValueModel(Trunk):
    """Its head is replicated on the ranks of the last stage."""

    def __init__(self, hf: PretrainedConfig, config: TrainerConfig) -> None:
        super().__init__(hf, config, tied=False)
        if self.post_process:
            self.output_layer = None
            self.value_head = nn.Linear(hf.hidden_size, 1, bias=False, dtype=self.config.params_dtype)


def build_value_model(hf: PretrainedConfig, config: TrainerConfig, train_attention: bool = True) -> ValueModel:
    """This rank's part of the value model, with uninitialised weights, on this process's device. Indexers of sparse
    attention are frozen.

    Args:
        train_attention: False freezes the attention as well (SAO does).
    """
    model = ValueModel(hf, config).to(platform.device())
    train_only(model, lambda name: INDEXER not in name and (train_attention or ".self_attention." not in name))
    model.train()
    return model


def token_values(
    model: ValueModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout
) -> Float32[Tensor, " tokens"]:
    """Values of a micro-batch's tokens, with gradient, from the last stage's output; see the module. Every tensor- and
    context-parallel rank gets the same result."""
    if model.config.sequence_parallel:
        # Every rank computes the same values, so that each one's gradient is a slice and not a sum.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    hidden = layout.read(hidden.squeeze(1))
    values = torch.nn.functional.linear(hidden.float(), model.value_head.weight.float())
    return to_tokens(values.squeeze(1), layout)
