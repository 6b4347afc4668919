"""Filter parallelism: every rank computes some of the filters of each layer."""
