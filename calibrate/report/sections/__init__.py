"""One section of ``calibrate show`` a file."""
