"""What has to agree exactly: parallel with serial training, runs with their plans, numbers of two commits."""
