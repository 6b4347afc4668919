"""What a machine with a GPU measures: a check, and the results that are kept."""
