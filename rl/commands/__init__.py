"""The subcommands of ``atelier``, a module each.

A module ``rl.commands.NAME`` has ``SUMMARY``, a line for the list of commands, and ``main(arguments) -> int``, which
gets what follows the name on the command line and returns the exit code. ``rl.cli.COMMANDS`` lists the names. What
takes seconds to import is imported where it is used.
"""
