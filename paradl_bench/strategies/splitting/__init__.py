"""What filter, channel and tensor parallelism share: which layers are split, what each rank holds."""
