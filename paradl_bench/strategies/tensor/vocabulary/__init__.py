"""The embedding of tokens, the head and the loss of a language model, cut over the tokens of its vocabulary."""
