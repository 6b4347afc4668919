"""``python -m predict``: the same as ``predict``."""

from predict.cli import main

main()
