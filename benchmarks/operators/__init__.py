"""Parts of `ops.py`: cases, checks, times."""
