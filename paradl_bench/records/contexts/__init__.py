"""Records of collectives in contexts: after compute, beside compute or an all-reduce."""
