"""`python -m doublehorizon` is the command `doublehorizon`."""

from doublehorizon.cli import main

main()
