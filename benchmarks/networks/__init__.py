"""Networks that benchmarks train and no library has; a command names one as ``own_networks:branches``."""
