"""Parts of `compare_upstream.py`: models, rows, floors, checks, timing."""
