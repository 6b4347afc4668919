"""Layer profiles: every operation in situ or alone, shards of it, and what becomes of gradients."""
