"""``atelier plan engine=gpu_hisparse model=glm5 gpus=8``: what an engine holds of a model, and how fast it decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl.commands.exits import EXIT_BAD_CONFIG
from rl.compose import compose_plan
from rl.config import ConfigError

SUMMARY = "KV capacity and decode speed of an engine, from the model's config alone"
USAGE = """usage: atelier plan [engine=NAME] [model=NAME] [key=value ...]

Keys are those of configs/plan.yaml: gpus=8 gpu_memory=141GB host_memory=2TB context=40960 output=8192 locality=0.95
hbm_bandwidth=4TB pcie_bandwidth=55GB ..., those of the engine (engine.hisparse.host_to_device_ratio=16), and
model.checkpoint=DIRECTORY for a model of your own."""


def main(arguments: Sequence[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    from rl.plan import check_plan, make_plan

    try:
        config = check_plan(compose_plan(arguments))
        plan = make_plan(config)
    except ConfigError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]config error:[/] {escape(str(error))}", soft_wrap=True)
        return EXIT_BAD_CONFIG
    console = Console(highlight=False)
    from rl.plan_report import curve_table, facts, notes, verdict

    _print_pairs(console, facts(config, plan))
    console.print(_table(*curve_table(plan)))
    for line in (*notes(plan), *verdict(config, plan)):
        console.print(escape(line), soft_wrap=True)
    return 0


def _print_pairs(console: Console, pairs: Iterator[tuple[str, str]]) -> None:
    for name, value in pairs:
        console.print(escape(f"{name:16}{value}"), soft_wrap=True)
    console.print()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
