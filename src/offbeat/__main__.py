"""`python -m offbeat` is `offbeat`."""

import sys

from offbeat.cli.main import main

sys.exit(main())
