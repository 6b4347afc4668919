"""Whether a strategy trains the model at hand as serial training does: one small mini-batch, in float64."""
