"""Expert parallelism: ranks hold some experts each, and send each other the tokens that these are for."""
