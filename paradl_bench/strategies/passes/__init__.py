"""How a rank passes through its model: micro-batches, recomputation, lower precision."""
