"""A model's loading, recorded once and repeated: the bits are those of the loader's own way, and what can't be repeated
is not."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from rollout.engine.load_plan import NoPlanError, load_and_plan
from rollout.engine.opened_memory import Layout, Placed, Request, answers
from rollout.engine.weight_loader import WeightLoader, checksums

SHAPES = {"norm": (8,), "q": (8, 8), "k": (4, 8), "v": (4, 8), "out": (8, 8), "embed": (10, 8)}
PADDED = 12


class Fused(nn.Module):
    """Takes q, k and v into one parameter, the second half of ``out`` alone, and pads the embedding, as SGLang's layers
    do; ``embed`` and ``head`` are one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.empty(8))
        self.qkv = nn.Parameter(torch.empty(16, 8))
        self.out = nn.Parameter(torch.empty(8, 4))
        self.embed = nn.Parameter(torch.full((PADDED, 8), 7.0))
        self.head = self.embed
        self.register_buffer("positions", torch.arange(4.0))

    def load_weights(self, named):
        for name, tensor in named:
            self.load_one(name, tensor)

    def load_one(self, name, tensor):
        if name in "qkv":
            begin, size = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}[name]
            self.qkv.data.narrow(0, begin, size).copy_(tensor)
        elif name == "out":
            self.out.data.copy_(tensor.narrow(1, 4, 4))
        elif name == "embed":
            self.embed[:10].data.copy_(tensor)
            self.embed[10:].data.fill_(0)
        else:
            getattr(self, name).data.copy_(tensor)


def layout(order=tuple(SHAPES), dtype="float32"):
    placed, at = [], 0
    for name in order:
        placed.append(Placed(name=name, dtype=dtype, shape=SHAPES[name], begin=at))
        at += torch.Size(SHAPES[name]).numel() * getattr(torch, dtype).itemsize
    return placed, torch.zeros(at, dtype=torch.uint8)


def named(placed, memory):
    return [(each.name, each.view(memory)) for each in placed]


def randomize(weights):
    for _, tensor in weights:
        tensor.copy_(torch.randn(tensor.shape))


def loaded(weights, make=Fused):
    """What the loader's own way leaves."""
    model = make()
    with torch.no_grad():
        model.load_weights(weights)
    return checksums(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the second is converted to the parameters'
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])  # SGLang has either
def test_a_plan_leaves_the_bits_that_the_loader_leaves(mode, dtype):
    placed, memory = layout(dtype=dtype)
    weights, model = named(placed, memory), Fused()
    randomize(weights)
    with mode():
        plan = load_and_plan(model, weights, memory)
        assert checksums(model) == loaded(weights)
        for batched in (False, True, False):
            randomize(weights)
            assert checksums(model) != loaded(weights)
            plan.bind(memory).run(batched)
            assert checksums(model) == loaded(weights)
            assert plan.holds()


def test_neighbours_are_copied_together():
    placed, memory = layout()
    plan = load_and_plan(Fused(), named(placed, memory), memory)
    assert len(plan.copies) == 5  # norm; q, k and v; out; embed and its padding
    placed, memory = layout(("v", "norm", "k", "out", "q", "embed"))
    assert len(load_and_plan(Fused(), named(placed, memory), memory).copies) == 7


class Latent(Fused):
    """Puts q and k together before it copies them, and derives a tensor from what it loaded, as SGLang's DeepSeek."""

    derived = None

    def load_weights(self, named):
        waiting = {}
        for name, tensor in named:
            if name in ("q", "k"):
                waiting[name] = tensor
            else:
                self.load_one(name, tensor)
        self.qkv[:12].data.copy_(torch.cat([waiting["q"], waiting["k"]], dim=0))
        self.post_load_weights(list(dict(named)))

    def post_load_weights(self, names=None):
        assert names is None or "out" in names
        found = (self.out.data * 2).t().contiguous()
        if self.derived is None:
            self.derived = found
        else:
            self.derived.copy_(found)


def test_joined_and_derived_tensors_follow(tmp_path):
    placed, memory = layout()
    weights, model = named(placed, memory), Latent()
    randomize(weights)
    with torch.inference_mode():
        plan = load_and_plan(model, weights, memory)
        for _ in range(2):
            randomize(weights)
            plan.bind(memory).run()
            assert checksums(model) == loaded(weights, Latent)
            assert torch.equal(model.derived, model.out.t() * 2)
    assert len(plan.copies) == 5
    assert "post_load_weights" not in vars(model)


class Crooked(Latent):
    def load_one(self, name, tensor):
        if name == "v":
            whole = torch.cat([tensor, tensor])
            self.qkv[12:].data.copy_(whole[2:6])
        else:
            super().load_one(name, tensor)


class Computes(Fused):
    def load_one(self, name, tensor):
        super().load_one(name, tensor * 2 if name == "out" else tensor)


class Derives(Fused):
    def load_weights(self, named):
        super().load_weights(named)
        self.transposed = self.out.data.t().contiguous()


class Reads(Fused):
    def load_one(self, name, tensor):
        if name == "norm":
            self.norm.data.fill_(tensor[0].item())
        else:
            super().load_one(name, tensor)


class Threads(Fused):
    def load_weights(self, named):
        with ThreadPoolExecutor(1) as pool:
            for done in [pool.submit(self.load_one, *each) for each in named]:
                done.result()


class Replaces(Fused):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "norm":
            self.norm = nn.Parameter(self.norm.data.clone())


class Twice(Fused):
    """As where embedding and head are tied, and each is loaded."""

    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        super().load_one(name, tensor)


def test_the_same_copy_twice_is_one():
    placed, memory = layout()
    weights, model = named(placed, memory), Twice()
    plan = load_and_plan(model, weights, memory)
    assert len(plan.copies) == 5
    randomize(weights)
    plan.bind(memory).run()
    assert checksums(model) == loaded(weights)


class Columns(Fused):
    """Pads ``out`` by columns, between which the values lie."""

    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(torch.full((8, 11), 7.0))

    def load_one(self, name, tensor):
        if name == "out":
            self.out.data.narrow(1, 8, 3).zero_()
            self.out.data.narrow(1, 0, 8).copy_(tensor)
        else:
            super().load_one(name, tensor)


def test_columns_that_lie_between_one_another_are_apart():
    placed, memory = layout()
    weights, model = named(placed, memory), Columns()
    plan = load_and_plan(model, weights, memory)
    randomize(weights)
    plan.bind(memory).run()
    assert checksums(model) == loaded(weights, Columns)


class Overlaps(Columns):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "out":
            self.out.data.narrow(1, 7, 2).zero_()


class Overwrites(Fused):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "k":
            super().load_one("v", tensor)


class Adds(Fused):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        self.norm.data.add_(1)


class Elsewhere(Fused):
    def load_one(self, name, tensor):
        self.kept = torch.empty(tensor.shape)
        self.kept.copy_(tensor)
        super().load_one(name, tensor)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Computes, r"aten.mul.Tensor computes"),
        (Derives, "computes"),
        (Reads, "computes"),
        (Threads, "no copy of .* was seen"),
        (Replaces, "computes something"),
        (Overwrites, "same place"),
        (Overlaps, "same place"),
        (Adds, "aten.add_.Tensor changes"),
        (Elsewhere, "not the model's"),
        (Crooked, "not the model's"),
    ],
)
def test_what_a_loader_does_beside_copying_is_not_repeated(make, why):
    placed, memory = layout()
    weights, model = named(placed, memory), make()
    randomize(weights)
    with torch.no_grad(), pytest.raises(NoPlanError, match=why):
        load_and_plan(model, weights, memory)
    assert checksums(model) == loaded(weights, make)  # loaded all the same


class Asking:
    """A loader, and its answers to requests about one memory."""

    def __init__(self, tmp_path):
        self.placed, self.memory = layout()
        self.opened = []
        self.loader = WeightLoader(self.open)
        self.file = tmp_path / "answers"

    def open(self, handle):
        self.opened.append(handle)
        if handle == "dead":
            raise OSError("its process is gone")
        return self.memory

    def ask(self, model, memory_id, handle=None, rounds=(0, 1), layout_id="layout", **settings):
        layout = Layout(rounds=(tuple(self.placed[:3]), tuple(self.placed[3:])))
        request = Request(
            layout_id=layout_id,
            memory_id=memory_id,
            rounds=rounds,
            answers=self.file,
            layout=None if handle is None else layout,
            handle=handle,
            **settings,
        )
        with torch.inference_mode():
            self.loader.load(model, [(request.model_dump_json(), torch.empty(0))])
        return list(answers(self.file))[-1]

    def randomize(self):
        randomize(named(self.placed, self.memory))

    def expected(self):
        return loaded(named(self.placed, self.memory))


def test_a_memory_is_opened_once(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    hows = []
    for handle in ("one", None, None, "again", None):
        asking.randomize()
        answer = asking.ask(model, "a", handle, checksums=True)
        assert answer.error == ""
        assert answer.checksums == asking.expected()
        assert 0 <= answer.seconds["copy"] <= answer.ended - answer.began
        hows.append(answer.how)
    assert hows == ["loader, recorded", *["plan"] * 4]
    assert asking.opened == ["one"]


def test_rounds_have_plans_of_their_own(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    for handle, how in (("one", "loader, recorded"), (None, "plan")):
        asking.randomize()
        assert asking.ask(model, "a", handle, rounds=(0,)).how == how
        assert asking.ask(model, "a", rounds=(1,), checksums=True).checksums == asking.expected()


def test_another_memory_takes_the_place_of_the_one_before(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    asking.ask(model, "a", "one")
    asking.memory = asking.memory.clone()  # another trainer's, whose tensors lie in the same places
    asking.randomize()
    answer = asking.ask(model, "b", "two", checksums=True)
    assert (answer.how, answer.checksums) == ("plan", asking.expected())
    assert "memory a is not open here" in asking.ask(model, "a").error
    assert "its process is gone" in asking.ask(model, "c", "dead").error
    assert "memory b is not open here" in asking.ask(model, "b").error
    asking.randomize()
    assert asking.ask(model, "b", "two", checksums=True).checksums == asking.expected()


def test_another_layout_is_recorded_anew(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    asking.ask(model, "a", "one")
    assert "layout other is not known" in asking.ask(model, "a", layout_id="other").error
    asking.placed, asking.memory = layout(tuple(reversed(SHAPES)))
    asking.randomize()
    answer = asking.ask(model, "b", "two", layout_id="other", checksums=True)
    assert (answer.how, answer.checksums) == ("loader, recorded", asking.expected())
    asking.randomize()
    answer = asking.ask(model, "b", layout_id="other", checksums=True)
    assert (answer.how, answer.checksums) == ("plan", asking.expected())


def test_a_memory_that_is_not_kept_is_closed_and_the_plan_stays(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    for how in ("loader, recorded", "plan", "plan"):
        asking.memory = asking.memory.clone()
        asking.randomize()
        answer = asking.ask(model, "a", "one", keep=False, checksums=True)
        assert (answer.how, answer.checksums) == (how, asking.expected())
        assert "not open here" in asking.ask(model, "a").error


@pytest.mark.parametrize("make", [Fused, Computes])
def test_a_closed_memory_is_referred_to_by_nothing(tmp_path, make):
    asking, model = Asking(tmp_path), make()
    asking.loader = WeightLoader(lambda handle: pickle.loads(pickle.dumps(asking.memory)))
    asking.ask(model, "a", "one")
    asking.ask(model, "a")
    memory = StorageWeakRef(asking.loader._opened.memory.untyped_storage())
    assert not memory.expired()
    assert asking.ask(model, "b", "two").error == ""
    assert memory.expired()


def test_a_parameter_that_moved_is_planned_anew(tmp_path):
    asking, model = Asking(tmp_path), Fused()
    asking.ask(model, "a", "one")
    for move in ("data", "replaced"):
        if move == "data":
            model.qkv.data = torch.zeros_like(model.qkv)
        else:
            model.norm = nn.Parameter(torch.zeros(8))
        asking.randomize()
        answer = asking.ask(model, "a", checksums=True)
        assert (answer.how, answer.checksums) == ("loader, recorded", asking.expected())
    assert asking.ask(model, "a").how == "plan"


def test_each_model_of_a_process_has_its_plan(tmp_path):
    asking, models = Asking(tmp_path), (Fused(), Fused())
    for handle, how in (("one", "loader, recorded"), (None, "plan")):
        asking.randomize()
        for model in models:
            answer = asking.ask(model, "a", handle, checksums=True)
            assert (answer.how, answer.checksums) == (how, asking.expected())


def test_a_loader_that_fails_says_so_and_does_not_raise(tmp_path):
    class Fails(Fused):
        def load_weights(self, named):
            raise RuntimeError("no room")

    assert "RuntimeError: no room" in Asking(tmp_path).ask(Fails(), "a", "one").error


def test_who_cannot_be_answered_does_not_end_the_server(tmp_path, caplog):
    """A folder that went with the trainer, and what is no request at all."""
    asking = Asking(tmp_path)
    asking.file = tmp_path / "gone" / "answers"
    with pytest.raises(IndexError):  # there is no answer
        asking.ask(Fused(), "a", "one")
    asking.loader.load(Fused(), [("no request", torch.empty(0))])
    assert [record.message[:40] for record in caplog.records] == [
        "weights were asked for by who no longer ",
        "this is no request to load weights from ",
    ]
