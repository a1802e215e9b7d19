"""Run a command that the kernel kills when the process that started it is gone, however that one died.

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

The setting outlives exec. It is made here, not in a ``preexec_fn``, because running Python between fork and exec of a
process with threads can deadlock. The kernel ties it to the parent *thread*, see ``rollout.processes``.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above, so no signal will come
        sys.exit(f"the parent process {parent} is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
