"""Tables of kernels' and collectives' times, and the mapping files that say what their columns are."""
