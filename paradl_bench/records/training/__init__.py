"""Records of training runs: configuration, iterations, compilation, the proof, and ghost layers."""
