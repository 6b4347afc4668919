"""Closed forms of an iteration: ParaDL's, OSF's, fusion of gradients."""
