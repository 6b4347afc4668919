"""Feeding a model: reading, decoding, collating, copying to the device, torch's DataLoader."""
