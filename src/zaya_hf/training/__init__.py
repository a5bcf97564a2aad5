"""Training: optimizer, learning-rate schedule, balancing of the routers, and one loop for every model family."""
