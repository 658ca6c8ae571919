"""`python -m partita_check head/`."""

from partita_check.cli import main

raise SystemExit(main())
