"""Settings for all tests."""

import logging

from hypothesis import settings

# The machine decides how long an example takes, not the code under test.
settings.register_profile("airs", deadline=None)
settings.load_profile("airs")

# One line a request of the test client would bury what a failing test says.
logging.getLogger("httpx").setLevel(logging.WARNING)
