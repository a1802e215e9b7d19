"""Small teachers for tests: real tensors of several types and sizes, written to a real store."""

from __future__ import annotations

import torch

from teachers.store import TeacherStore

torch.set_num_threads(1)  # copies of kilobytes gain nothing from more, and their threads spin

SHARD = "tp0of1.pp0of1.ep0of1"


def weights(seed: int, width: int = 64, layers: int = 4) -> dict[str, torch.Tensor]:
    """A teacher: an embedding that is its head too, layers, a scalar, a bias of odd length, and an empty tensor."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    embedding = rand(3 * width, width).bfloat16()
    tensors = {"embedding.weight": embedding}
    for layer in range(layers):
        tensors[f"decoder.layers.{layer}.mlp.weight"] = rand(width, 2 * width).bfloat16()
        tensors[f"decoder.layers.{layer}.norm.weight"] = rand(width).float()
        tensors[f"decoder.layers.{layer}.bias"] = rand(7).half()
    tensors["scale"] = rand(1)[0].double()
    tensors["nothing"] = torch.empty(0, 3)
    tensors["head.weight"] = embedding
    return tensors


def finetuned(base: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """A share of each matrix's elements is changed, some of them to NaN and minus zero."""
    g = torch.Generator().manual_seed(seed)
    changed = {name: tensor.clone() for name, tensor in base.items()}
    for name, tensor in changed.items():
        if name == "head.weight":
            changed[name] = changed["embedding.weight"]
        elif tensor.dim() == 2 and tensor.numel():
            mask = torch.rand(tensor.shape, generator=g) < share
            tensor[mask] = torch.randn(int(mask.sum()), generator=g).to(tensor.dtype)
            tensor[0, :2] = torch.tensor([float("nan"), -0.0]).to(tensor.dtype)
    return changed


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.cpu().contiguous().reshape(-1).view(torch.uint8), b.cpu().contiguous().reshape(-1).view(torch.uint8)
        )
    )


def assert_same(views, expected) -> None:
    assert set(views) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(views[name], tensor), name


class Tensors(dict):
    """Teachers' tensors; says little of itself, since failures print it."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"


def made_store(root, count: int, **kwargs) -> tuple[TeacherStore, Tensors]:
    store = TeacherStore(root)
    teachers = Tensors({f"t{i}": weights(i, **kwargs) for i in range(count)})
    for name, tensors in teachers.items():
        store.add(name, SHARD, tensors.items())
    return store, teachers
