"""Selection of one slot per token."""

from .op import route
from .op import takes as route_takes
from .reference import RouterWeights, Routing, count_slots, initial_balancing_biases, select_slots

__all__ = [
    "RouterWeights",
    "Routing",
    "count_slots",
    "initial_balancing_biases",
    "route",
    "route_takes",
    "select_slots",
]
