"""What a machine is and can do: the doctor, nodes side by side, hosts of ranks, roofline rates."""
