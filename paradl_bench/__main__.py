"""``python -m paradl_bench``: the same as ``paradl-bench``."""

from paradl_bench.cli import main

main()
