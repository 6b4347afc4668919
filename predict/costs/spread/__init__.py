"""How far seconds may be off: errors that parts share, and ranks that come late."""
