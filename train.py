"""Train: ``python train.py +stage=agent_rl [key=value ...]``. See configs/ for the keys."""

import sys

from rl.commands.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
