"""What ghost layers sleep in an emulated run, as the cost model has it."""
