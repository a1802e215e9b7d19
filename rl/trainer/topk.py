"""The most likely tokens and their log-probs, as a teacher gives them, with the vocabulary split over ranks.

Each tensor-parallel rank finds the ``k`` best of its own rows; the best of those of all ranks are the best of all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rl.trainer.head import to_tokens
from rl.trainer.model import PolicyModel
from rl.trainer.packing import Layout
from rl.trainer.products import product


@torch.no_grad()
def token_topk(
    model: PolicyModel, hidden: Float[Tensor, "local 1 hidden"], layout: Layout, k: int, chunk: int
) -> tuple[Float32[Tensor, "tokens k"], Int32[Tensor, "tokens k"]]:
    """Log-probs (natural, at the sampling temperature, descending) and ids of the ``k`` most likely tokens at the place
    of each token of a micro-batch; zeros at tokens that are not scored. Every tensor- and context-parallel rank gets
    the same result.

    Args:
        chunk: tokens whose logits exist at the same time.

    Raises:
        ValueError: the vocabulary has less than ``k`` tokens.
    """
    if not 1 <= k <= model.tokens:
        raise ValueError(f"top-k of {k} tokens from a vocabulary of {model.tokens}")
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    hidden = layout.read(hidden.squeeze(1))
    weight, inverse_temperature = model.output_weight(), 1.0 / layout.temperature
    logprobs = hidden.new_empty(len(hidden), k, dtype=torch.float32)
    ids = torch.empty_like(logprobs, dtype=torch.int32)
    for begin in range(0, len(hidden), chunk):
        part = slice(begin, begin + chunk)
        logits = product(hidden[part], weight.T).mul_(inverse_temperature[part, None])
        logprobs[part], ids[part] = _best(model, logits, k)
    return to_tokens(logprobs, layout), to_tokens(ids, layout)


def _best(
    model: PolicyModel, logits: Float32[Tensor, "chunk vocab_part"], k: int
) -> tuple[Float32[Tensor, "chunk k"], Int32[Tensor, "chunk k"]]:
    group = parallel_state.get_tensor_model_parallel_group()
    values, rows = logits.topk(min(k, logits.size(1)), dim=-1)
    ids = rows + group.rank() * model.rows_per_rank
    normalizer = logits.logsumexp(-1)
    if group.size() > 1:
        missing = (0, k - values.size(1))  # the last rank may have fewer rows than k
        values = _gathered(torch.nn.functional.pad(values, missing, value=-torch.inf), group)
        ids = _gathered(torch.nn.functional.pad(ids, missing), group)
        normalizer = _gathered(normalizer[:, None], group).logsumexp(-1)
        values, best = values.topk(k, dim=-1)
        ids = ids.gather(1, best)
    return values - normalizer[:, None], ids.int()


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' columns side by side."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)
