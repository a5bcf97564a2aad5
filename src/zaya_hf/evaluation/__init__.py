"""Evaluation of language models with lm-evaluation-harness, and the statistics of its results."""
