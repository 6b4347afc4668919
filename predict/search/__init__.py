"""``predict search``: every strategy for a number of ranks, the best of them predicted exactly."""
