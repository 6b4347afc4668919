"""Seconds of reading a mini-batch and of copying it to the device."""
