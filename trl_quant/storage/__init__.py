"""Checkpoints on disk: their layout and files, what `prepare` and `export` read and write, and their model cards."""
