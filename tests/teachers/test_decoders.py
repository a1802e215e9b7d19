"""What a GPU decodes in one go is decoded once, from where it was staged; and the Triton kernels against the decoders
of the CPU: on a GPU, or, where Triton is installed, in its interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teachers import codec
from teachers.arena import Arena
from teachers.batches import ALIGN, BLOCK, Batch, Encoded, batches
from teachers.device import Lane, Source
from teachers.format import StoredTensor, dtype_name, padded, tensor_bytes
from teachers.tiers import TierManager
from tests.teachers.made import SHARD, assert_same

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PIECE = 2 * BLOCK
"""Smaller than real ones, so that tensors of many pieces are small."""


class Stored:
    """Encoded tensors, one behind the other as in pinned memory, and what they stand for."""

    def __init__(self, register: bool = False) -> None:
        self.tensors: list[Encoded] = []
        self.raw: list[torch.Tensor] = []
        self.image_bytes = 0
        self._data: list[torch.Tensor] = []
        self._register = register
        self._bases: list[torch.Tensor] = []

    def delta(self, dtype: torch.dtype, numel: int, share: float, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        old = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=g)
        new, integers = old.clone(), codec.INTEGERS[dtype.itemsize]
        new.view(integers)[torch.rand(numel, generator=g) < share] += 1
        data, counts = codec.encode_delta(new, old, dtype.itemsize)
        self._add("delta", dtype, (numel,), data, counts, old, new)

    def fp8(self, dtype: torch.dtype, *shape: int, seed: int = 0) -> None:
        tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        tensor[0] = 0
        tensor[-1] *= 1e-4  # below what float16 has as normal numbers, times its scale
        raw = tensor_bytes(tensor)
        self._add("fp8", dtype, shape, codec.encode_fp8(tensor)[0], (), torch.zeros_like(raw), raw)

    def codes(self, dtype: torch.dtype) -> None:
        """Each code of fp8, with several scales."""
        scales = torch.tensor([1.0, 3e-5, 0.3, torch.finfo(torch.float32).tiny])
        data = torch.cat([scales.view(torch.uint8), torch.arange(256, dtype=torch.uint8).repeat(4)])
        raw = torch.zeros(4 * 256 * dtype.itemsize, dtype=torch.uint8)
        self._add("fp8", dtype, (4, 256), data, (), raw, raw)

    def _add(self, encoding, dtype, shape, data, counts, old, new) -> None:
        tensor = StoredTensor(name="w", shape=shape, dtype=dtype_name(dtype), encoding=encoding, counts=counts)
        begin = sum(map(len, self._data))
        self._data.append(torch.nn.functional.pad(data, (0, padded(len(data)) - len(data)), value=0xAA))
        self.tensors.append(Encoded.of(tensor, self.image_bytes, begin))
        self.raw.append(new)
        self._bases.append(torch.nn.functional.pad(old, (0, padded(len(old)) - len(old))))
        self.image_bytes += len(self._bases[-1])

    @property
    def stored(self) -> torch.Tensor:
        return torch.cat(self._data)

    @property
    def base(self) -> torch.Tensor:
        return torch.cat(self._bases)

    @property
    def workspace_bytes(self) -> int:
        return codec.workspace_bytes(max(t.pieces[-1].stop for t in self.tensors))

    def source(self) -> Source:
        """In frames that are not neighbours."""
        stored = self.stored
        arena = Arena(64 * 4096 * (1 + len(stored) // (32 * 4096)), self._register)
        frames = arena.allocate(len(stored))[::-1]
        at = 0
        for begin, end in arena.spans(frames, 0, len(stored)):
            arena.memory[begin:end] = stored[at : at + end - begin]
            at += end - begin
        return Source(arena, frames, {})


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(codec, "PIECE_ELEMENTS", PIECE)


def staged(batch: Batch, stored: torch.Tensor, room: int) -> torch.Tensor:
    workspace = torch.full((room,), 0xBB, dtype=torch.uint8)
    for at, begin, size in batch.copies:
        assert (at - begin) % ALIGN == 0
        workspace[at : at + size] = stored[begin : begin + size]
    return workspace


def decoded(stored: Stored, room: int) -> tuple[torch.Tensor, list[Batch]]:
    """By the rows of the tables, each with the decoder of the CPU."""
    image, found = stored.base, list(batches(stored.tensors, room))
    for batch in found:
        assert batch.nbytes <= room
        assert max(at + size for at, _, size in batch.copies) <= batch.table_at
        workspace, counters = staged(batch, stored.stored, room), 0
        for kind, rows in batch.jobs.items():
            size = kind.dtype.itemsize
            for out, head, body, elements, last in rows:
                target = image[out * size : (out + elements) * size]
                if kind.fp8:
                    scales = workspace[4 * head : 4 * head + 4 * (elements // last)]
                    codec.decode_fp8(target, scales, workspace[body : body + elements], kind.dtype)
                    continue
                counters += -(-elements // BLOCK)
                bitmap = workspace[head : head + -(-elements // 8)]
                changed = int(sum(int(byte).bit_count() for byte in bitmap))
                codec.apply_delta(target, bitmap, workspace[size * body : size * (body + changed)], size)
        assert counters == batch.counters
    return image, found


def assert_decoded(image: torch.Tensor, stored: Stored) -> None:
    for tensor, raw in zip(stored.tensors, stored.raw, strict=True):
        got = image[tensor.out : tensor.out + len(raw)]
        if not tensor.kind.fp8:
            assert torch.equal(got, raw)
        elif raw.any():
            a, b = (t.view(tensor.kind.dtype).double() for t in (got, raw))
            assert (a - b).norm() < 0.04 * b.norm()


MATRICES = st.tuples(st.integers(1, 40), st.integers(1, 900))
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_piece_is_staged_and_decoded_once_within_the_workspace(small_pieces, data):
    stored = Stored()
    for seed in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            stored.fp8(data.draw(st.sampled_from(DTYPES[1:])), *data.draw(MATRICES), seed=seed)
        else:
            numel = data.draw(st.one_of(st.integers(20, 300), st.integers(20, 5 * PIECE)))
            stored.delta(data.draw(st.sampled_from(DTYPES)), numel, data.draw(st.floats(0, 0.8)), seed)
    room = stored.workspace_bytes * data.draw(st.sampled_from([1, 1, 3, 100]))
    image, _ = decoded(stored, room)
    assert_decoded(image, stored)


def test_tensors_that_fit_together_are_one_copy_and_one_table(small_pieces):
    stored = Stored()
    for seed in range(4):
        stored.delta(torch.bfloat16, 3 * PIECE + 5, 0.1, seed)
    _, (batch,) = decoded(stored, 1 << 20)
    assert len(batch.copies) == 1
    assert [len(rows) for rows in batch.jobs.values()] == [16]


def test_a_tensor_that_does_not_fit_is_cut_between_pieces(small_pieces):
    stored = Stored()
    stored.delta(torch.bfloat16, 9 * PIECE + 1, 0.2)
    _, found = decoded(stored, 16 << 10)
    assert len(found) > 2
    with pytest.raises(ValueError, match="a workspace of 1000 bytes holds no piece"):
        list(batches(stored.tensors, 1000))


@pytest.mark.parametrize("numel", [1, 3, 17, 129])
def test_the_least_workspace_holds_the_smallest_tensors(numel):
    for dtype in DTYPES:
        stored = Stored()
        stored.delta(dtype, numel, 0.9)
        if dtype != torch.uint8:
            stored.fp8(dtype, 1, numel)
            stored.fp8(dtype, numel, 1)
        image, _ = decoded(stored, stored.workspace_bytes)
        assert_decoded(image, stored)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_codes_are_looked_up_as_torch_converts_them(dtype):
    stored = Stored()
    stored.codes(dtype)
    image, _ = decoded(stored, stored.workspace_bytes)
    scales = stored.stored[:16].view(torch.float32).unsqueeze(1)
    codes = stored.stored[16 : 16 + 1024].view(torch.float8_e4m3fn).view(4, 256)
    expected = (codes.float() * scales).to(dtype).view(-1)
    assert torch.equal(image[: 1024 * dtype.itemsize], expected.view(torch.uint8))


def by_triton(stored: Stored, room: int, device: str) -> torch.Tensor:
    lane, image = Lane(torch.device(device)), stored.base.to(device)
    workspace = torch.full((room,), 0xCC, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    source = stored.source()
    with lane.use():
        lane.decode_batches(stored.tensors, image, source, workspace)
    lane.synchronize()
    source.arena.close()
    return image.cpu()


def assert_same_decoded(stored: Stored, room: int) -> None:
    expected, got = decoded(stored, room)[0], by_triton(stored, room, "cuda" if GPU else "cpu")
    different = (expected != got).nonzero().view(-1)
    assert not len(different), (int(different[0]), len(different))


RESULTS = [torch.float16, torch.float32, torch.float64, *([torch.bfloat16] if GPU else [])]
"""Triton's interpreter cuts bfloat16 off where a GPU rounds."""

needs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a CUDA device, or Triton's interpreter"),
]


class TestTriton:
    pytestmark = needs_triton

    @pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_deltas_give_the_bits_that_the_cpu_gives(self, small_pieces, dtype, share):
        stored = Stored(GPU)
        for seed, numel in enumerate((20, PIECE, 2 * PIECE + 4097, 3 * PIECE - 3)):
            stored.delta(dtype, numel, share, seed)
        assert_same_decoded(stored, stored.workspace_bytes)

    @pytest.mark.parametrize("dtype", RESULTS)
    def test_fp8_gives_the_bits_that_the_cpu_gives(self, small_pieces, dtype):
        stored = Stored(GPU)
        for shape in ((3, 5), (70, 333), (9, PIECE), (2, 3, 129), (5000, 1)):
            stored.fp8(dtype, *shape)
        assert_same_decoded(stored, stored.workspace_bytes)

    def test_every_code_of_fp8(self):
        for dtype in RESULTS:
            stored = Stored(GPU)
            stored.codes(dtype)
            expected = decoded(stored, stored.workspace_bytes)[0].view(dtype)
            got = by_triton(stored, stored.workspace_bytes, "cuda" if GPU else "cpu").view(dtype)
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

    def test_kinds_share_batches_and_real_pieces_are_counted_through(self):
        stored = Stored(GPU)
        stored.delta(torch.bfloat16, codec.PIECE_ELEMENTS + 4099, 0.3)
        stored.fp8(torch.float32, 33, 1001)
        stored.delta(torch.float32, 1000, 0.5)
        assert_same_decoded(stored, stored.workspace_bytes)


def test_an_empty_tensor_that_comes_twice_takes_no_other_s_place(tmp_path):
    from teachers.store import TeacherStore

    tensors = {"empty": torch.empty(0, 3), "weight": torch.arange(6.0), "again": torch.empty(0, 3)}
    store = TeacherStore(tmp_path)
    store.add("t", SHARD, tensors.items())
    store.add("eight", SHARD, {"w": torch.ones(8, 8), **tensors}.items(), fp8=True)  # not filled in one go
    tiers = TierManager(store, SHARD, "cpu", 1 << 20, 1 << 20)
    for name in ("t", "eight"):
        with tiers.lease(name) as views:
            assert_same({key: views[key] for key in tensors}, tensors)
    tiers.close()
