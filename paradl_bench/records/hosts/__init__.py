"""Records of hosts: where each rank ran, how far clocks were apart, what else the cores did."""
