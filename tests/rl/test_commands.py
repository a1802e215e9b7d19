"""``atelier`` finds its subcommands."""

import pytest

from rl.cli import COMMANDS, main
from rl.commands.exits import EXIT_BAD_CONFIG


def test_help_lists_every_command(capsys):
    assert main([]) == main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)


def test_a_misspelt_command(capsys):
    assert main(["trian"]) == EXIT_BAD_CONFIG
    assert capsys.readouterr().err == "atelier trian: no such command; did you mean train?\n"


def test_arguments_reach_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["plot", "--out", "x.png"])
    assert "atelier plot: error: the following arguments are required: runs" in capsys.readouterr().err
    assert main(["train", "+stage=nothing"]) == EXIT_BAD_CONFIG
    assert "+stage=nothing: there is no such stage" in capsys.readouterr().err
