"""Patches: exact, checked, and refused where they do not fit."""

import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.weights import copies as copying
from rl.weights import delta
from rl.weights.copies import Copies
from rl.weights.delta import MODEL, DeltaError, PartHead, PatchHead, parse_head
from rl.weights.tensor_files import LENGTH, places


def patch(new, version, old=None, base=None, sender=MODEL):
    """By default of the sender that the copies began with."""
    return delta.patch(new, version, old, base, sender=sender)


SHAPES = {"a.weight": (64, 33), "b.weight": (7,), "c.scale": (5,), "d.bias": (1, 1)}


def model(directory, seed, dtype=torch.bfloat16):
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    weights["c.scale"] = weights["c.scale"].float()
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"seed": seed}))
    return weights


def changed(directory, weights, share, seed=1):
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < share
        new[name] = torch.where(mask, tensor + tensor.abs() + 1, tensor)
    save_file(new, directory / "model.safetensors")
    return new


def apply(copies, frames):
    """As the receiver does; returns the directory."""
    frames = iter(frames)
    head, _ = split(next(frames), PatchHead)
    patching = copies.patching(head)
    try:
        for frame in frames:
            patching.part(*split(frame, PartHead))
        return copies.add(patching)
    finally:
        patching.close()


def split(frame, kind):
    (length,) = LENGTH.unpack(frame[: LENGTH.size])
    end = LENGTH.size + length
    return parse_head(frame[LENGTH.size : end], kind), frame[end:]


def same(directory, weights):
    found = load_file(directory / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_patch_gives_the_sender_s_bits(tmp_path, share):
    old = model(tmp_path / "v0", 0)
    new = changed(tmp_path / "new", old, share)
    copies = Copies(tmp_path / "copies", tmp_path / "v0", 0)
    directory = apply(copies, patch(tmp_path / "new", 1, tmp_path / "v0", 0))
    assert same(directory, new)
    assert (directory / "config.json").exists()
    assert same(tmp_path / "v0", old)  # the base is not written to


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_several_parts_of_every_width_stay_exact(tmp_path, monkeypatch, share, threads):
    monkeypatch.setattr(delta, "PART_BYTES", 64)
    monkeypatch.setattr(delta, "threads", lambda: threads)
    monkeypatch.setattr(copying, "threads", lambda: threads)
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.float8_e4m3fn)
    old = {
        f"{at}.{n}": torch.randn(n, generator=generator).to(d) for at, d in enumerate(dtypes) for n in (0, 1, 7, 333)
    }
    new = {}
    for name, tensor in old.items():
        raw = tensor.view(torch.uint8)
        new[name] = torch.where(torch.rand(raw.shape, generator=generator) < share, raw ^ 255, raw).view(tensor.dtype)
    for directory, weights in (("v0", old), ("new", new)):
        (tmp_path / directory).mkdir()
        save_file(weights, tmp_path / directory / "model.safetensors")
    for number, frames in enumerate([patch(tmp_path / "new", 1, tmp_path / "v0", 0), patch(tmp_path / "new", 2)]):
        directory = apply(Copies(tmp_path / f"copies{number}", tmp_path / "v0", 0), frames)
        found = load_file(directory / "model.safetensors")
        assert found.keys() == new.keys()
        assert all(torch.equal(found[name].view(torch.uint8), new[name].view(torch.uint8)) for name in new)
    assert sum(1 for _ in patch(tmp_path / "new", 1)) > 1 + len(new)


def test_models_in_several_files_keep_their_files(tmp_path):
    both = []
    for directory, seed in (("v0", 0), ("new", 1)):
        (tmp_path / directory).mkdir()
        generator = torch.Generator().manual_seed(seed)
        both.append({name: torch.randn(50, 60, generator=generator) for name in ("a", "b", "c")})
        save_file({"a": both[-1]["a"]}, tmp_path / directory / "1.safetensors", {"format": "pt"})
        save_file({name: both[-1][name] for name in "bc"}, tmp_path / directory / "2.safetensors")
        (tmp_path / directory / "model.safetensors.index.json").write_text("{}")
    directory = apply(Copies(tmp_path / "copies", tmp_path / "v0", 0), patch(tmp_path / "new", 1, tmp_path / "v0", 0))
    found = load_file(directory / "1.safetensors") | load_file(directory / "2.safetensors")
    assert all(torch.equal(found[name], both[1][name]) for name in "abc")
    assert (directory / "model.safetensors.index.json").exists()


def test_a_byte_that_is_lost_or_changed_on_the_way_is_found(tmp_path):
    old = model(tmp_path / "v0", 0)
    changed(tmp_path / "new", old, 0.3)
    frames = list(patch(tmp_path / "new", 1, tmp_path / "v0", 0))
    largest = max(range(1, len(frames)), key=lambda at: len(frames[at]))
    generator = np.random.default_rng(0)
    _, body = split(frames[largest], PartHead)
    refused = 0
    for at in generator.integers(0, len(body), 50):
        damaged = bytearray(body)
        damaged[at] ^= 1 << int(generator.integers(8))
        frame = frames[largest][: -len(body)] + bytes(damaged)
        copies = Copies(tmp_path / "copies", tmp_path / "v0", 0)
        try:
            directory = apply(copies, [*frames[:largest], frame, *frames[largest + 1 :]])
        except DeltaError:
            refused += 1
            continue
        # zstd has bits that mean nothing
        assert (directory / "model.safetensors").read_bytes() == (tmp_path / "new/model.safetensors").read_bytes()
    assert refused > 25


def test_parts_that_come_twice_or_in_another_order_are_refused(tmp_path):
    old = model(tmp_path / "v0", 0)
    changed(tmp_path / "new", old, 0.3)
    first, *rest = patch(tmp_path / "new", 1, tmp_path / "v0", 0)
    for frames in ([rest[0], rest[0]], rest[::-1], [*rest, rest[-1]]):
        with pytest.raises(DeltaError, match="is not what comes next in the patch"):
            apply(Copies(tmp_path / "copies", tmp_path / "v0", 0), [first, *frames])


def test_who_stops_taking_a_patch_leaves_no_thread(tmp_path):
    model(tmp_path / "v0", 0)
    frames = patch(tmp_path / "v0", 1)
    next(frames)
    next(frames)
    assert any(thread.name.startswith("patch") for thread in threading.enumerate())
    frames.close()
    assert not any(thread.name.startswith("patch") for thread in threading.enumerate())


def test_versions_of_another_sender_are_none_of_ours(tmp_path):
    """A receiver may have served another run, whose versions have the same numbers."""
    old = model(tmp_path / "v0", 0)
    new = changed(tmp_path / "new", old, 0.01)
    copies = Copies(tmp_path / "copies", tmp_path / "v0", 0)
    apply(copies, patch(tmp_path / "v0", 7, sender="before"))
    with pytest.raises(DeltaError, match=r"against version 7, here are \[\] of this sender"):
        apply(copies, patch(tmp_path / "new", 8, tmp_path / "v0", 7, sender="now"))
    assert same(apply(copies, patch(tmp_path / "new", 7, sender="now")), new)
    assert copies.versions[7].sender == "now"


def test_special_values_travel(tmp_path):
    old = model(tmp_path / "v0", 0)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a.weight"][0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    (tmp_path / "new").mkdir()
    save_file(new, tmp_path / "new" / "model.safetensors")
    directory = apply(Copies(tmp_path / "c", tmp_path / "v0", 0), patch(tmp_path / "new", 1, tmp_path / "v0", 0))
    found = load_file(directory / "model.safetensors")["a.weight"]
    assert torch.equal(found.view(torch.int16), new["a.weight"].view(torch.int16))


def test_all_values_need_no_base(tmp_path):
    model(tmp_path / "v0", 0)
    new = model(tmp_path / "new", 5, dtype=torch.float32)  # another dtype than the copy's
    directory = apply(Copies(tmp_path / "c", tmp_path / "v0", 0), patch(tmp_path / "new", 4))
    assert same(directory, new)
    assert json.loads((directory / "config.json").read_text()) == {"seed": 0}


def test_the_same_weights_in_another_format_are_not_copied_along(tmp_path):
    model(tmp_path / "v0", 0)
    (tmp_path / "v0" / "pytorch_model-00001-of-00002.bin").write_bytes(b"large")
    directory = apply(Copies(tmp_path / "c", tmp_path / "v0", 0), patch(tmp_path / "v0", 1))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]


def test_patches_follow_one_another_and_two_versions_are_kept(tmp_path):
    weights = model(tmp_path / "v0", 0)
    copies = Copies(tmp_path / "copies", tmp_path / "v0", 0)
    before = tmp_path / "v0"
    for version in range(1, 5):
        weights = changed(tmp_path / f"n{version}", weights, 0.1, seed=version)
        directory = apply(copies, patch(tmp_path / f"n{version}", version, before, version - 1))
        assert same(directory, weights)
        before = tmp_path / f"n{version}"
    assert sorted(copies.versions) == [3, 4]
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["v3", "v4"]
    assert places(tmp_path / "v0")  # the model that the engine was started with stays


def test_another_base_is_found_by_its_checksums(tmp_path):
    old = model(tmp_path / "v0", 0)
    model(tmp_path / "other", 9)
    changed(tmp_path / "new", old, 0.01)
    copies = Copies(tmp_path / "copies", tmp_path / "other", 0)  # says that it has version 0, but has not
    with pytest.raises(DeltaError, match=r"has checksum .* the sender's"):
        apply(copies, patch(tmp_path / "new", 1, tmp_path / "v0", 0))
    assert list(copies.versions) == [0]
    assert not (tmp_path / "copies" / "v1").exists()


def test_a_missing_base_and_missing_tensors_are_refused(tmp_path):
    old = model(tmp_path / "v0", 0)
    changed(tmp_path / "new", old, 0.01)
    copies = Copies(tmp_path / "copies", tmp_path / "v0", 0)
    with pytest.raises(DeltaError, match=r"against version 7, here are \[0\] of"):
        apply(copies, patch(tmp_path / "new", 8, tmp_path / "v0", 7))
    with pytest.raises(DeltaError, match="ends without 1 parts"):
        apply(copies, list(patch(tmp_path / "new", 1, tmp_path / "v0", 0))[:-1])
    assert list(copies.versions) == [0]


def test_models_of_other_shapes_have_no_patch(tmp_path):
    model(tmp_path / "v0", 0)
    model(tmp_path / "new", 0, dtype=torch.float32)
    with pytest.raises(DeltaError, match="do not hold the same tensors"):
        list(patch(tmp_path / "new", 1, tmp_path / "v0", 0))


def test_a_patch_is_about_as_large_as_what_changed(tmp_path):
    directory = tmp_path / "v0"
    directory.mkdir()
    weights = {"w": torch.randn(1000, 1000).bfloat16()}
    save_file(weights, directory / "model.safetensors")
    sizes = []
    for share in (0.0, 0.01, 0.1, 1.0):
        changed(tmp_path / f"new{share}", weights, share)
        sizes.append(sum(map(len, patch(tmp_path / f"new{share}", 1, directory, 0))) / weights["w"].nbytes)
    assert sizes[0] < 0.001
    assert sizes[1] < 0.04  # the values, and their gaps
    assert 0.05 < sizes[2] < 0.2
    assert sizes[3] < 1.1
