"""``python -m malleable`` is the ``malleable`` command."""

from malleable.cli import main

raise SystemExit(main())
