"""What other programs that train are told: settings of theirs from a strategy, and back. One file a program."""
