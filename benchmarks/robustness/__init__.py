"""Changed inputs and killed commands, and what is left after them."""
