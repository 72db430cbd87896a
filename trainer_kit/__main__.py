"""`python -m trainer_kit` is the command `trainer-kit`."""

import sys

from trainer_kit.cli.main import main

sys.exit(main())
