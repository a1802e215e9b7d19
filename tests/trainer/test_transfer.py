"""Tensors travel packed, and arrive as they were."""

import dataclasses

import torch

from rl.trainer.packing import build_layout
from rl.trainer.transfer import _map, send_packed, sent

CPU = torch.device("cpu")


def test_packed_tensors_arrive_as_they_were():
    tensors = [
        torch.arange(7),
        torch.tensor([True, False, True]),
        torch.randn(3, 5).T,
        torch.empty(0, dtype=torch.int64),
        torch.randn(4, 1, 2, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(300, dtype=torch.int32),
    ]
    arrived = send_packed(tensors, CPU, pin=False)
    for found, given in zip(arrived, tensors, strict=True):
        assert found.dtype == given.dtype
        assert torch.equal(found, given)


def test_a_structure_keeps_its_shape_and_what_is_no_tensor():
    ids, edges = torch.arange(20), torch.tensor([0, 8, 20])
    layout = build_layout(ids, edges, torch.ones(2), flash=True)
    moved, index = _map((layout, ids), lambda tensor: tensor + 1)
    assert torch.equal(index, ids + 1)
    assert torch.equal(moved.token_ids, layout.token_ids + 1)
    assert torch.equal(moved.packing.spans.query_edges, layout.packing.spans.query_edges + 1)
    assert moved.packing.spans.longest_query == layout.packing.spans.longest_query
    assert moved.packing.routed_experts is None
    assert moved.tokens == layout.tokens == 20
    rows = build_layout(ids, edges, torch.ones(2)).packing.buckets
    assert len(_map(rows, torch.clone)) == len(rows)
    assert sent(layout, CPU) is layout
    assert {f.name for f in dataclasses.fields(moved)} == {f.name for f in dataclasses.fields(layout)}
