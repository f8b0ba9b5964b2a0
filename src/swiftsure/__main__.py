"""`python -m swiftsure`: the command line."""

from swiftsure.cli import main

if __name__ == "__main__":
    main()
