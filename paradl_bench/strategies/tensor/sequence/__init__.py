"""Parts of the sequence: which tensors they are of, what runs on them, and tensor parallelism beside them."""
