"""``predict explore``: a page on this machine alone, whose sliders are what-ifs."""
