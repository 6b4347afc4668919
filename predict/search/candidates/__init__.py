"""Which strategies a search considers, which are the same, and which are ruled out."""
