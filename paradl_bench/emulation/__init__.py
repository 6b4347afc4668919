"""Real strategies on ghost layers, which sleep for their profiled time instead of computing."""
