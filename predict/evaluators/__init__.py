"""Ways from costs to an iteration: one file each, found by discovery."""
