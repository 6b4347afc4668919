"""What the three programs share at the terminal: how they start, what they print, how they end."""
