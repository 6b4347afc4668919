"""Training runs of a strategy: request, one rank's trainer, what is recorded and shown; emulated runs."""
