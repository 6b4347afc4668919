"""A calibration as a chain of Slurm jobs: what runs, the scripts, their submission, and what is missing."""
