"""Selection of one slot per token."""

from .reference import count_slots, initial_balancing_biases, select_slots

__all__ = ["count_slots", "initial_balancing_biases", "select_slots"]
