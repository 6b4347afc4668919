"""One file a layer kind: which torch functions it covers, attributes, FLOPs."""
