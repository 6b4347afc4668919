"""A user's module as one rank runs it: operations seen, layers sharded, collectives for autograd."""
