"""Speed and memory of the trainer; see ``__main__``."""
