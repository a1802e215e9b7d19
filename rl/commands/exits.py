"""Exit codes of the commands."""

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130
