"""Run the command line: `python -m kvmap`."""

from kvmap.cli.app import main

if __name__ == "__main__":
    main()
