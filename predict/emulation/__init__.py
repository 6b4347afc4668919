"""What ghost layers sleep in an emulated run, by the cost model."""
