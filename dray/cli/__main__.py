from dray.cli import main

main()
