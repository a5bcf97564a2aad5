"""Selection of one slot per token."""

from .reference import count_slots, select_slots

__all__ = ["count_slots", "select_slots"]
