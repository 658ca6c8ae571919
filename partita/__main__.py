"""`python -m partita`: the command line."""

from partita.cli import main

if __name__ == "__main__":
    main()
