"""Tensor fusion: which gradients share an all-reduce by a rule other than DDP's, and the plan that sends them so."""
