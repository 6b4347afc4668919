"""One file a command of paradl-bench, found by discovery."""
