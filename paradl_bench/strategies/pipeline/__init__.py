"""Pipeline parallelism: each rank holds some stages of the network and micro-batches pass through them."""
