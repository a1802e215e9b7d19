"""``atelier teachers add|list|verify|gc``: the store that teachers' weights are loaded from.

``add`` does ahead of time what a run would do when it starts: it imports the same shards, which the run then finds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rl.commands.exits import EXIT_BAD_CONFIG, EXIT_FAILED
from rl.config import ConfigError
from rl.teachers.config import DistillationConfig, TeacherConfig
from rl.trainer.config import ParallelConfig, TrainerConfig

if TYPE_CHECKING:
    from rich.progress import Progress

    from rl.teachers.sources import TeacherSource
    from teachers.errors import TeacherError
    from teachers.store import TeacherStore

SUMMARY = "import, list, verify and clean up the store of teachers"
LAYOUT_KEYS = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "dtype")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from teachers.errors import TeacherError
    from teachers.store import TeacherStore

    if options.command == "add":
        return _add(options)
    if not options.store.is_dir():
        print(f"atelier teachers: no folder {options.store}", file=sys.stderr)
        return EXIT_FAILED
    commands: dict[str, Callable[[TeacherStore, argparse.Namespace], int]] = {
        "list": _list,
        "verify": _verify,
        "gc": _gc,
    }
    try:
        return commands[options.command](TeacherStore(options.store), options)
    except TeacherError as error:
        print(f"atelier teachers: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="atelier teachers", description=SUMMARY)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "add", help="import a teacher, or those of a run, for a parallel layout", description=_ADD_DESCRIPTION
    )
    add.add_argument("name", nargs="?", help="what the run calls it")
    add.add_argument("source", nargs="?", type=Path, help="HF directory, a finished run's folder, or a checkpoint")
    add.add_argument(
        "--layout", nargs="+", default=[], metavar="KEY=VALUE", help=f"of the trainer: {', '.join(LAYOUT_KEYS)}"
    )
    add.add_argument("--base", help="teacher of the store, or source, to which only the difference is kept")
    add.add_argument("--codec", choices=("exact", "fp8"), help="fp8: matrices in 8 bits, not exact")
    add.add_argument("--replace", action="store_true", help="the name may be another teacher's already")
    add.add_argument("--run", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help="all that follows is as for train.py")
    listing = commands.add_parser("list", help="what is in the store")
    verify = commands.add_parser("verify", help="read every byte and compare checksums; fails when something is wrong")
    verify.add_argument("names", nargs="*", help="these teachers alone")
    gc = commands.add_parser("gc", help="free what nothing refers to")
    gc.add_argument("--remove", nargs="+", default=[], metavar="NAME", help="forget these teachers first")
    for command in (add, listing, verify, gc):
        command.add_argument("--store", type=Path, required=command is not add, help="folder of the store")
    return parser


_ADD_DESCRIPTION = """Import what a run would import when it starts. Either `add NAME SOURCE --store DIR [--layout
tensor=2 pipeline=2 dtype=bfloat16]`, or `add --run +stage=opd +teacher=[a,b] ... distillation.store=DIR`, with the
command line of the run: all of its teachers, for its layout."""


class _Refused(Exception):
    """What was asked for can't be; the message is all there is to say."""


def _add(options: argparse.Namespace) -> int:
    try:
        store, sources, trainer = _of_run(options) if options.run is not None else _of_one(options)
    except (_Refused, ConfigError) as error:
        print(f"atelier teachers add: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    from rl.teachers.layouts import import_for_layout
    from rl.trainer.convert import WeightMismatchError
    from rl.trainer.families.base import UnsupportedModelError
    from rl.trainer.manifest import CheckpointError
    from teachers.errors import TeacherError

    try:
        with _progress() as progress:

            def begin(teacher: str, shard: str, total: int) -> Callable[[int], None]:
                task = progress.add_task(f"{teacher} {shard}", total=total)
                return lambda count: progress.advance(task, count)

            for cut in import_for_layout(store, sources, trainer, begin):
                if cut.added is None:
                    print(f"{cut.teacher} {cut.shard}: there already")
                    continue
                sizes = f"{_size(cut.added.tensor_bytes)} of tensors ({_kinds(cut.added.encodings)})"
                print(f"{cut.teacher} {cut.shard}: {sizes}, {_size(cut.added.new_bytes)} written")
                if cut.added.fp8_error:
                    print(f"  largest relative RMS error of a matrix in fp8: {cut.added.fp8_error:.4f}")
    except (TeacherError, UnsupportedModelError, WeightMismatchError, CheckpointError) as error:
        print(f"atelier teachers add: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


_Wanted = tuple["TeacherStore", Sequence["TeacherSource"], TrainerConfig]


def _of_run(options: argparse.Namespace) -> _Wanted:
    """The teachers of a run, as the run itself would import them."""
    if options.name is not None or options.store is not None:
        raise _Refused(
            "with --run the teachers and distillation.store are the run's: leave out NAME, SOURCE and --store"
        )
    from rl.compose import compose_config
    from rl.config import check
    from rl.preflight import check_run
    from teachers.errors import TeacherError
    from teachers.store import TeacherStore

    plan = check_run(check(compose_config(options.run)))
    if plan.teaching is None or not plan.teaching.sources:
        raise _Refused("this run holds no teacher's weights: add +teacher=[NAME,...] (configs/teacher)")
    if plan.config.distillation.store is None:
        raise _Refused("distillation.store: required, but not set; name the folder that the run will use")
    try:
        return TeacherStore(plan.config.distillation.store), plan.teaching.sources, plan.config.trainer
    except TeacherError as error:
        raise _Refused(str(error)) from error


def _of_one(options: argparse.Namespace) -> _Wanted:
    if options.name is None or options.source is None or options.store is None:
        raise _Refused("give NAME SOURCE --store DIR, or --run and the run's command line")
    from rl.teachers.sources import TeacherSourceError, resolve_all
    from teachers.errors import TeacherError
    from teachers.store import TeacherStore

    trainer = _trainer(options.layout)
    try:
        wanted = {"source": options.source, "base": options.base, "codec": options.codec}
        teachers = {options.name: TeacherConfig.model_validate(wanted)}
        store = TeacherStore(options.store)
        if options.base in store.names() and options.base != options.name:
            teachers[options.base] = TeacherConfig.model_validate({"source": _noted(store, options.base)["source"]})
        sources = resolve_all(teachers, DistillationConfig.model_validate({}))
        (own,) = (source for source in sources if source.name == options.name)
        if options.name in store.names() and not options.replace:
            noted = _noted(store, options.name)
            if noted["fingerprint"] != own.mark:
                raise _Refused(
                    f"teacher {options.name} is in {store.root} already, of {noted['source']} as it was then, or kept "
                    "otherwise; choose another name, or --replace it"
                )
    except (TeacherError, TeacherSourceError) as error:
        raise _Refused(str(error)) from error
    return store, [own], trainer


def _noted(store: TeacherStore, name: str) -> Mapping[str, Any]:
    return store.open(name, store.shards(name)[0]).meta


def _trainer(layout: Sequence[str]) -> TrainerConfig:
    pairs = dict(item.partition("=")[::2] for item in layout)
    unknown = sorted(pairs.keys() - set(LAYOUT_KEYS))
    if unknown:
        raise _Refused(f"--layout {unknown[0]}: no such key; known: {', '.join(LAYOUT_KEYS)}")
    dtype = {"dtype": pairs.pop("dtype")} if "dtype" in pairs else {}
    try:
        parallel = ParallelConfig.model_validate(pairs)
        ranks = parallel.model_ranks * parallel.expert * parallel.expert_tensor
        return TrainerConfig.model_validate({"parallel": parallel, "world_size": ranks, **dtype})
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False)
        key = ".".join(str(part) for part in problem["loc"])
        raise _Refused(f"--layout {key}: {problem['msg'].removeprefix('Value error, ')}") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _list(store: TeacherStore, options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("teacher", "shard", "tensors", "on the device", "stored", "base", "log-prob error in fp8")
    errors: list[TeacherError] = []
    for entry in store.list(errors.append):
        sizes = _size(entry.device_bytes), _size(entry.stored_bytes)
        error = _error(entry.meta) if "fp8" in entry.encodings else ""
        table.add_row(entry.teacher, entry.shard, _kinds(entry.encodings), *sizes, entry.base or "", error)
    Console().print(table)
    for failure in errors:
        print(f"atelier teachers: {failure}", file=sys.stderr)
    return EXIT_FAILED if errors else 0


def _error(meta: Mapping[str, Any]) -> str:
    from rl.teachers.fidelity import LogprobError

    found = LogprobError.noted(meta)
    return str(found) if found is not None else "not measured: a run does it"


def _verify(store: TeacherStore, options: argparse.Namespace) -> int:
    from teachers.errors import MissingTeacherError
    from teachers.format import Manifest
    from teachers.upkeep import verify

    unknown = sorted(set(options.names) - set(store.names()))
    if unknown:
        raise MissingTeacherError(f"no teacher {', '.join(unknown)}; there are {', '.join(store.names()) or 'none'}")
    total = sum(path.stat().st_size for path in store.packs.glob("*.pack"))
    with _progress() as progress:
        task = progress.add_task("verify", total=total)
        problems = verify(store, options.names or None, lambda count: progress.advance(task, count))
    for problem in problems:
        print(f"{problem.teacher or '-'}: {problem.path}: {problem.what}")
    for _, manifest in store.manifests():
        if not isinstance(manifest, Manifest) or (options.names and manifest.teacher not in options.names):
            continue
        if any(tensor.encoding == "fp8" for tensor in manifest.tensors):
            print(f"{manifest.teacher} {manifest.shard}: log-prob error in fp8: {_error(manifest.meta)}")
    repair = "gc --remove NAME forgets a damaged teacher, and the next add or run imports it again"
    print(f"{len(problems)} problems; {repair}" if problems else "all as it was written")
    return EXIT_FAILED if problems else 0


def _gc(store: TeacherStore, options: argparse.Namespace) -> int:
    from teachers.upkeep import gc

    for name in options.remove:
        store.remove(name)
    freed = gc(store)
    print(f"{freed.files} files with {_size(freed.file_bytes)}, and {_size(freed.holes)} within files, freed")
    if freed.kept:
        print(f"{_size(freed.kept)} within files stay: this file system can't free a part of a file")
    return 0


def _kinds(encodings: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in encodings.items())


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
