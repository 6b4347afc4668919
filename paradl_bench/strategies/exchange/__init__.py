"""Gradients summed among ranks that hold the same parameters, as torch's DistributedDataParallel does it."""
