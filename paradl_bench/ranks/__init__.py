"""Ranks: started, named, joined into groups, watched for hangs; their clocks, environment and directories."""
