"""How a model is executed: precision, compilation, layout, optimizer, micro-batches, probes."""
