"""Records of collectives that follow compute or run beside another collective."""
