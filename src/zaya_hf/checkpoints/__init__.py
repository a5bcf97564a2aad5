"""Checkpoint layouts of ZAYA1 and what is done with them. Importing this package imports nothing else."""
