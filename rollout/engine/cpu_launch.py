"""Start an SGLang server: on a machine with CUDA as SGLang does, elsewhere on the CPU without its GPU packages.

    python -m rollout.engine.cpu_launch --model-path DIRECTORY --device cpu ...

The arguments are SGLang's own.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch

from rollout.engine import cpu_stand_ins


def _fork_workers() -> None:
    """Have SGLang fork its workers: without CUDA that is safe, starts faster, and hands the stand-ins on."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang asks for spawn


def main(arguments: list[str]) -> None:
    """Serve until stopped; ends with SGLang's own exit code."""
    deterministic = None
    if not torch.cuda.is_available():
        cpu_stand_ins.install()
        _fork_workers()
        if "--enable-deterministic-inference" in arguments:
            deterministic = cpu_stand_ins.enable_deterministic_inference()
        if "--enable-return-routed-experts" in arguments:
            cpu_stand_ins.record_experts_in_plain_memory()
        if "--disaggregation-mode" in arguments:
            cpu_stand_ins.transfer_from_host_memory()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        del deterministic


if __name__ == "__main__":
    main(sys.argv[1:])
