"""Cost terms of collectives: what algorithms cost in alpha, beta and gamma_r, flat, over nodes, in pieces."""
