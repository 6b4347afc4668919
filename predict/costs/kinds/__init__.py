"""How works are priced: one file a kind, found by discovery, and what they are priced with."""
