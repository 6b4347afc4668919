"""Statistics of measurements: blocks, paired draws, robust regression."""
