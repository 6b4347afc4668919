"""Process groups: how ranks of one run meet, prove who they are, and agree on small values."""
