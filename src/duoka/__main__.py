"""`python -m duoka` is `duoka`."""

import sys

from duoka.cli import main

sys.exit(main())
