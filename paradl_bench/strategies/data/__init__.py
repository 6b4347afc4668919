"""Data parallelism as torch's DistributedDataParallel does it."""
