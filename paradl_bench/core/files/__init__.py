"""Files: read within limits, written atomically, JSON lines that survive a kill, YAML that people write."""
