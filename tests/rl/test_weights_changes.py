"""Changes between two arrays: exact for all bits, small where few changed, refused where they are of other arrays."""

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.weights.changes import Changes, decode, encode, from_gaps, from_planes, to_gaps, to_planes

WIDTHS = (1, 2, 4, 8)
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def assert_there_and_back(new, old, itemsize):
    changes = encode(new, old.copy(), itemsize)
    assert np.array_equal(decode(changes, old.copy(), itemsize), new)
    return changes


@st.composite
def arrays(draw):
    """Two arrays of which a share differs, by a little or in all bits."""
    width, count = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 3000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = generator.integers(0, 256, count * width, np.uint8)
    share = draw(st.sampled_from([0.0, 1e-3, 0.01, 0.1, 0.24, 0.26, 0.9, 1.0]))
    largest = draw(st.sampled_from([1, 200, 2 ** (8 * width) - 1]))
    steps = generator.integers(0, largest, count, UNSIGNED[width], endpoint=True)
    steps = np.where(generator.random(count) < 0.5, steps, -steps)
    steps[generator.random(count) >= share] = 0
    return (old.view(UNSIGNED[width]) + steps).view(np.uint8), old, width


@settings(max_examples=300, deadline=None)
@given(arrays())
def test_what_is_decoded_is_what_was_encoded(both):
    assert_there_and_back(*both)


@settings(max_examples=200, deadline=None)
@given(st.sets(st.one_of(st.integers(0, 300), st.integers(0, 100_000)), min_size=1))
def test_positions_survive_their_gaps(positions):
    rising = np.array(sorted(positions))
    gaps = to_gaps(rising)
    assert len(gaps) == len(rising) + sum((np.diff(rising, prepend=-1) - 1) // 255)
    assert np.array_equal(from_gaps(gaps), rising)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_of_one_is_small_whatever_its_sign_also_around_the_end(width):
    largest = 2 ** (8 * width) - 1
    differences = np.array([0, 1, largest, 2, largest - 1, largest // 2, largest // 2 + 1], UNSIGNED[width])
    planes = to_planes(differences)
    assert [int(plane[0]) for plane in planes] == [0] * width
    assert [int(value) for value in planes[0][:5]] == [0, 2, 1, 4, 3]
    assert all(not plane[:5].any() for plane in planes[1:])
    assert np.array_equal(from_planes(planes), differences)


@pytest.mark.parametrize(
    ("share", "encoding", "at_most"),
    [(0.0, "same", 0), (0.001, "sparse", 0.002), (0.01, "sparse", 0.008), (0.1, "sparse", 0.05), (0.5, "dense", 0.13)],
)
def test_steps_to_the_next_value_take_little_more_than_their_positions(share, encoding, at_most):
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, 500_000, np.uint16)
    steps = (generator.random(len(old)) < share) * generator.choice(np.array([1, 2**16 - 1], np.uint16), len(old))
    new = (old + steps.astype(np.uint16)).view(np.uint8)
    changes = assert_there_and_back(new, old.view(np.uint8), 2)
    assert changes.encoding == encoding
    assert sum(map(len, changes.streams)) <= at_most * len(new)


def test_all_values_come_where_nothing_is_alike():
    generator = np.random.default_rng(0)
    new, old = (np.frombuffer(generator.bytes(100_000), np.uint8).copy() for _ in range(2))
    changes = assert_there_and_back(new, old, 2)
    assert changes.encoding in ("dense", "full")
    assert sum(map(len, changes.streams)) < 1.001 * len(new)
    assert encode(new, None, 2).encoding == "full"


def test_streams_that_are_cut_or_of_other_arrays_are_refused():
    generator = np.random.default_rng(0)
    old = generator.integers(0, 256, 8000, np.uint8)
    few, many = old.copy(), old.copy()
    few[::100] += 1
    many += 1
    for new, message in ((few, "changed, there are"), (many, "are expected")):
        changes = encode(new, old.copy(), 2)
        with pytest.raises(ValueError, match=message):
            decode(changes, old[:4000].copy(), 2)
        with pytest.raises(ValueError, match="not zstd"):
            decode(Changes(changes.encoding, tuple(stream[:-3] for stream in changes.streams)), old.copy(), 2)
        with pytest.raises(ValueError, match="are expected"):
            decode(Changes(changes.encoding, changes.streams[:-1]), old.copy(), 2)


@pytest.mark.parametrize("encoding", ["sparse", "dense", "full"])
def test_a_stream_that_would_take_any_memory_is_refused_before_it_does(encoding):
    endless = zstandard.ZstdCompressor().compress(bytes(8001))
    with pytest.raises(ValueError, match="8001 bytes, 8000 is the most"):
        decode(Changes(encoding, (endless, endless, endless)), np.zeros(8000, np.uint8), 2)
