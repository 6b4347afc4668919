"""Layers of a traced network replaced by others, without torch: shapes, FLOPs, bytes and parameters follow."""
