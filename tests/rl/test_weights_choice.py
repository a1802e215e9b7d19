"""The way that is taken, and the ways that cannot be gone."""

import pytest

from rl.weights.choose import Topology, choose


def topology(**changes):
    return Topology(**{"device": "cuda", "colocated": False, "one_machine": True, "receivers": False} | changes)


@pytest.mark.parametrize(
    ("changes", "way", "why"),
    [
        ({"colocated": True}, "ipc", "share GPUs"),
        ({}, "collective", "GPUs of their own"),
        ({"one_machine": False}, "collective", "NCCL"),
        ({"device": "cpu"}, "disk", "shared memory"),
        ({"device": "cpu", "one_machine": False}, "tensors", "HTTP"),
        ({"receivers": True}, "delta", "slow network"),
        ({"receivers": True, "colocated": True}, "delta", "slow network"),
    ],
)
def test_auto_follows_from_the_topology(changes, way, why):
    choice = choose("auto", topology(**changes))
    assert choice.way == way
    assert why in choice.why


@pytest.mark.parametrize("way", ["disk", "tensors", "ipc", "collective", "delta"])
def test_what_is_asked_for_is_taken_where_it_can_be(way):
    assert choose(way, topology(device="cpu")).way == way


@pytest.mark.parametrize(
    ("way", "changes", "remedy"),
    [
        ("ipc", {}, "cluster.colocated=true.*collective"),
        ("ipc", {"colocated": True, "one_machine": False}, "collective serves several"),
        ("collective", {"colocated": True}, "take ipc"),
        ("delta", {"one_machine": False}, "rl.weights.receiver.*publish.receivers"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(way, changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        choose(way, topology(**changes))
