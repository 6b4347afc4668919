"""Channel parallelism: every rank computes with some of the input channels of each layer."""
