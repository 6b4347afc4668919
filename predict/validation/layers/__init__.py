"""Regressed seconds of layers held against measured ones, by layer, stage and block."""
