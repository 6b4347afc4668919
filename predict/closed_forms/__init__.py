"""Closed forms of an iteration: ParaDL's, OSF's, and the ledgers of both."""
