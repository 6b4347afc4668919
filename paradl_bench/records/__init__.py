"""What files hold: measurements, environments, clusters, runs, hosts; each checks its own numbers."""
