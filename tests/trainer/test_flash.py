"""What FlashAttention is told, checked with a plain loop in its place: the spans cover each sample causally."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from rl.trainer.packing import build_layout

CPU = torch.device("cpu")


def loop(query, key, value, spans):
    """Causal attention inside each span, aligned at its end, as ``flash_attention`` defines it."""
    if spans.keys is not None:
        key, value = key[spans.keys], value[spans.keys]
    outputs = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(spans.query_edges.tolist()), itertools.pairwise(spans.key_edges.tolist()), strict=True
    ):
        assert q1 - q0 <= spans.longest_query < 2 * max(128, spans.query_edges.diff().max())
        assert k1 - k0 <= spans.longest_key
        q, k, v = query[q0:q1].transpose(0, 1), key[k0:k1].transpose(0, 1), value[k0:k1].transpose(0, 1)
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        outputs.append(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_spans_equal_attention_of_each_sample(context):
    lengths = torch.tensor([7, 1, 30, 12])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids, temperature = torch.arange(int(lengths.sum())), torch.ones(len(lengths))
    layouts = [
        build_layout(ids, cu_seqlens, temperature, context=context, context_rank=rank, flash=True)
        for rank in range(context)
    ]
    assert all(layout.packing.buckets == () for layout in layouts)
    local = layouts[0].local
    torch.manual_seed(0)
    query, key, value = torch.randn(3, context * local, 2, 8)  # rank-major, as gathered
    found = torch.cat(
        [
            loop(query[rank * local : (rank + 1) * local], key, value, layout.packing.spans)
            for rank, layout in enumerate(layouts)
        ]
    )
    chunks = 2 * context if context > 1 else 1
    order = layouts[0].packing.gathered_order if context > 1 else torch.arange(local)
    begin = 0
    for length in (lengths + chunks - 1) // chunks * chunks:
        sample = order[begin : begin + length]
        q, k, v = (x[sample].transpose(0, 1)[None] for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        assert torch.allclose(found[sample], expected, atol=1e-6)
        begin += int(length)
