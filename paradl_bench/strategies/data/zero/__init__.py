"""ZeRO stages of data parallelism: what its replicas share of optimizer state, gradients and parameters."""
