"""``atelier teachers add|list|verify|gc``: the store that teachers' weights are loaded from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rl.commands.exits import EXIT_FAILED

if TYPE_CHECKING:
    from torch import Tensor

    from teachers.store import TeacherStore

SUMMARY = "import, list, verify and clean up the store of teachers"
HF_SHARD = "hf"
"""The shard of a directory as it is. Runs import their own cut of a teacher, for their parallel layout, at start."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from teachers.errors import TeacherError
    from teachers.store import TeacherStore

    commands: dict[str, Callable[[TeacherStore, argparse.Namespace], int]] = {
        "add": _add,
        "list": _list,
        "verify": _verify,
        "gc": _gc,
    }
    if options.command != "add" and not options.store.is_dir():
        print(f"atelier teachers: no folder {options.store}", file=sys.stderr)
        return EXIT_FAILED
    try:
        return commands[options.command](TeacherStore(options.store), options)
    except TeacherError as error:
        print(f"atelier teachers: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="atelier teachers", description=SUMMARY)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="import a Hugging Face directory")
    add.add_argument("name")
    add.add_argument("source", type=Path, help="folder with *.safetensors")
    add.add_argument("--shard", default=HF_SHARD, help=f"key that the weights are kept under (default: {HF_SHARD})")
    add.add_argument("--base", help="teacher that this one was fine-tuned from: only what differs is kept")
    add.add_argument("--fp8", action="store_true", help="keep matrices in 8 bits: half the bytes, not exact")
    add.add_argument("--replace", action="store_true", help="the name may be there already")
    listing = commands.add_parser("list", help="what is in the store")
    verify = commands.add_parser("verify", help="read every byte and compare checksums; fails when something is wrong")
    verify.add_argument("names", nargs="*", help="these teachers alone")
    gc = commands.add_parser("gc", help="free what nothing refers to")
    gc.add_argument("--remove", nargs="+", default=[], metavar="NAME", help="forget these teachers first")
    for command in (add, listing, verify, gc):
        command.add_argument("--store", type=Path, required=True, help="folder of the store")
    return parser


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _tensors(files: Sequence[Path], read: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                tensor = file.get_tensor(name)
                read(tensor.nbytes)
                yield name, tensor


def _add(store: TeacherStore, options: argparse.Namespace) -> int:
    files = sorted(options.source.glob("*.safetensors"))
    if not files:
        print(f"atelier teachers add: no *.safetensors in {options.source}", file=sys.stderr)
        return EXIT_FAILED
    with _progress(f"import {options.name}", sum(path.stat().st_size for path in files)) as read:
        added = store.add(
            options.name,
            options.shard,
            _tensors(files, read),
            {"source": str(options.source)},
            options.base,
            fp8=options.fp8,
            replace=options.replace,
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in added.encodings.items())
    print(f"{options.name}: {_size(added.tensor_bytes)} of tensors ({kinds}), {_size(added.new_bytes)} written")
    if added.fp8_error:
        print(f"  largest relative RMS error of a matrix in fp8: {added.fp8_error:.4f}")
    return 0


def _list(store: TeacherStore, options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("teacher", "shard", "tensors", "on the device", "stored", "base")
    for entry in store.list():
        sizes = _size(entry.device_bytes), _size(entry.stored_bytes)
        table.add_row(entry.teacher, entry.shard, str(entry.tensors), *sizes, entry.base or "")
    Console().print(table)
    return 0


def _verify(store: TeacherStore, options: argparse.Namespace) -> int:
    from teachers.errors import MissingTeacherError
    from teachers.upkeep import verify

    unknown = sorted(set(options.names) - set(store.names()))
    if unknown:
        raise MissingTeacherError(f"no teacher {', '.join(unknown)}; there are {', '.join(store.names()) or 'none'}")
    total = sum(path.stat().st_size for path in store.packs.glob("*.pack"))
    with _progress("verify", total) as read:
        problems = verify(store, options.names or None, read)
    for problem in problems:
        print(f"{problem.teacher or '-'}: {problem.path}: {problem.what}")
    print(f"{len(problems)} problems" if problems else "all as it was written")
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


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
