"""Logs of nccl-tests and rccl-tests as they are found: text, JSON, tables in Markdown."""
