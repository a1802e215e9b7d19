"""The decoders of ``codec`` as Triton kernels, over all pieces of a batch (``batches``) in one launch or two.

    delta   count the changed elements of each block, then scatter: a block's first value lies behind those of the
            blocks before it in its piece
    fp8     code · scale

A GPU's memory moves a teacher's bytes in a tenth of the time that the link to it takes: what counts is the number of
launches and copies, which is that of batches here, not of tensors.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments are typed when it is compiled)
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from teachers.batches import BLOCK, BLOCKS, COLUMNS, ROW_BYTES, Batch


@triton.jit(do_not_specialize_on_alignment=["table"])
def _count(table, bitmaps, counters, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = table + tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    elements = tl.load(row + 3)
    if block * BLOCK < elements:
        place = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        bits = tl.load(bitmaps + tl.load(row + 1) + place, mask=place * 8 < elements, other=0).to(tl.int32)
        bits -= (bits >> 1) & 0x55
        bits = (bits & 0x33) + ((bits >> 2) & 0x33)
        tl.store(counters + tl.load(row + 4) + block, tl.sum((bits + (bits >> 4)) & 0x0F, 0))


@triton.jit(do_not_specialize_on_alignment=["table"])
def _scatter(
    table,
    bitmaps,
    values,
    counters,
    out,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = table + tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    elements = tl.load(row + 3)
    if block * BLOCK < elements:
        others = tl.arange(0, BLOCKS)
        before = tl.sum(tl.load(counters + tl.load(row + 4) + others, mask=others < block, other=0), 0)
        place = block * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(bitmaps + tl.load(row + 1) + place // 8, mask=place < elements, other=0).to(tl.int32)
        changed = (bits >> (place % 8)) & 1
        mask = changed == 1
        value = tl.load(values + tl.load(row + 2) + before + tl.cumsum(changed, 0) - changed, mask=mask)
        tl.store(out + tl.load(row) + place, value, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["table"])
def _fp8(table, scales, codes, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = table + tl.program_id(0) * COLUMNS
    block = tl.program_id(1)
    elements = tl.load(row + 3)
    if block * BLOCK < elements:
        place = block * BLOCK + tl.arange(0, BLOCK)
        mask = place < elements
        code = tl.load(codes + tl.load(row + 2) + place, mask=mask, other=0).to(tl.int32)
        # The bits of a float16 that is a 256th of it: exact, subnormal ones too, and on GPUs without float8.
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
        width = tl.load(row + 4).to(tl.int32)
        scale = tl.load(scales + tl.load(row + 1) + place // width, mask=mask, other=0.0)
        tl.store(out + tl.load(row) + place, (value * scale).to(out.dtype.element_ty), mask=mask)


def decode(batch: Batch, workspace: Tensor, image: Tensor) -> None:
    """Queue it on the current stream. What is staged lies in the workspace by then."""
    rows = torch.tensor([row for jobs in batch.jobs.values() for row in jobs], dtype=torch.int64)
    table = workspace[batch.table_at : batch.table_at + batch.rows * ROW_BYTES].view(torch.int64).view(-1, COLUMNS)
    table.copy_(rows.pin_memory() if table.is_cuda else rows, non_blocking=True)
    counters = workspace[batch.counters_at : batch.nbytes].view(torch.int32)
    first = 0
    for kind, jobs in batch.jobs.items():
        mine, out = table[first:], image.view(kind.dtype)
        first += len(jobs)
        grid = (len(jobs), triton.cdiv(max(job[3] for job in jobs), BLOCK))
        if kind.fp8:
            scales = workspace.view(torch.float32)
            _fp8[grid](mine, scales, workspace, out, COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=8)
        else:
            values = workspace.view(kind.dtype)
            _count[grid](mine, workspace, counters, COLUMNS=COLUMNS, BLOCK=BLOCK, num_warps=4)
            _scatter[grid](
                *(mine, workspace, values, counters, out),
                COLUMNS=COLUMNS, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8,
            )  # fmt: skip
