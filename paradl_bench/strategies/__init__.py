"""One folder an axis: what it declares, its plan (torch-free), its run (torch); and what axes share."""
