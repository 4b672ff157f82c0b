from doublehorizon.cli import main

main()
