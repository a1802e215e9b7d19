import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.trainer.layers import PackedAttention
from rl.trainer.packing import build_layout

CPU = torch.device("cpu")


def lay_out(lengths, **options):
    lengths = torch.tensor(lengths, dtype=torch.long)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = torch.arange(1, int(lengths.sum()) + 1)
    temperature = torch.arange(1, len(lengths) + 1).float()
    return tokens, cu_seqlens, build_layout(tokens, cu_seqlens, temperature, **options)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_every_token_is_predicted_from_its_predecessor(lengths, context, multiple):
    whole_targets, whole_temperature = [], []
    for rank in range(context):
        tokens, cu_seqlens, layout = lay_out(lengths, context=context, context_rank=rank, multiple=multiple)
        assert layout.token_ids.size(1) % multiple == 0
        assert layout.token_ids.size(1) > 0
        assert layout.token_ids.size(1) == layout.local == len(layout.packing.positions)
        assert len(layout.scored) == len(layout.targets) == len(layout.temperature)
        spread = torch.zeros(layout.local, dtype=torch.long).index_copy(0, layout.scored, layout.targets)
        whole_targets.append(spread)
        whole_temperature.append(torch.zeros(layout.local).index_copy(0, layout.scored, layout.temperature))
    assert len({len(targets) for targets in whole_targets}) == 1  # the ranks share evenly
    targets, temperature = torch.cat(whole_targets), torch.cat(whole_temperature)
    if context > 1:
        order = layout.packing.gathered_order
        targets, temperature = targets[order], temperature[order]
    assert torch.equal(targets[layout.predictors], tokens[layout.predicted])
    sample = torch.repeat_interleave(torch.arange(len(lengths)), cu_seqlens.diff())
    assert torch.equal(temperature[layout.predictors], sample[layout.predicted] + 1.0)
    first = set(cu_seqlens[:-1][cu_seqlens.diff() > 0].tolist())
    assert set(range(len(tokens))) - set(layout.predicted.tolist()) == first


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.sampled_from([1, 2, 4]), st.data())
def test_the_same_states_are_read_of_all_and_of_those_that_are_read(lengths, context, data):
    scored = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths))), dtype=bool)
    for rank in range(context):
        _, _, layout = lay_out(lengths, context=context, context_rank=rank, scored=scored)
        hidden = torch.arange(layout.local)[:, None]
        read = layout.read(hidden)
        assert torch.equal(read[:, 0], layout.scored)
        assert torch.equal(layout.read(read), read)  # a last layer may have left no others


class _OneRank:
    def size(self):
        return 1


@pytest.mark.parametrize("lengths", [[40], [5, 5, 5], [3, 1, 40, 128], [300, 10, 290, 100, 129, 1]])
def test_attention_stays_inside_each_sample(lengths):
    _, cu_seqlens, layout = lay_out(lengths)
    attention = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(attention)
    attention.scale, attention.context_group = None, _OneRank()
    torch.manual_seed(0)
    query = torch.randn(sum(lengths), 1, 4, 8)
    key, value = torch.randn(2, sum(lengths), 1, 2, 8)
    found = attention(query, key, value, None, packed_seq_params=layout.packing)
    for begin, end in itertools.pairwise(cu_seqlens):
        q, k, v = (x[begin:end].permute(1, 2, 0, 3) for x in (query, key, value))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert torch.allclose(found[begin:end, 0], expected[0].transpose(0, 1).flatten(1), atol=1e-6)


def test_short_samples_share_one_call_and_long_ones_are_not_padded_much():
    _, _, layout = lay_out([40, 20, 60, 3])
    assert len(layout.packing.buckets) == 1
    _, _, layout = lay_out([1000, 900, 500, 20])
    assert [bucket.keys.length for bucket in layout.packing.buckets] == [1000, 500, 20]
