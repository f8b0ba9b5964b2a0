"""`python -m swiftsure`: the command line."""

if __name__ == "__main__":
    from swiftsure.cli import main

    main()
