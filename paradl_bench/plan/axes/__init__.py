"""What an axis of a strategy declares of itself, and where its declaration is found."""
