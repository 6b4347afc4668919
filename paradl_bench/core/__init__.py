"""What every room stands on: units, errors, bounds, discovery, files, the terminal; nothing of training."""
