"""Seconds and memory, predicted beside real runs on this machine."""
