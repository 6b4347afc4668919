"""When every task of one predicted iteration runs: as a trace for Perfetto and as a picture."""
