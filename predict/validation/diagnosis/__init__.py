"""Diagnoses: the limitations and bottlenecks of ParaDL's Table 6 that a configuration or a run has, with remedies."""
