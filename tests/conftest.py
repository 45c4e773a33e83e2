"""Settings for all tests."""

import logging
import os
import sys

import pytest
from hypothesis import settings

# The machine decides how long an example takes, not the code under test.
settings.register_profile("airs", deadline=None)
settings.load_profile("airs")

# Measuring takes 13 s at each first start of a real model, and every stack is a first one.
os.environ.setdefault("AIRS_MODEL_TUNED", "off")

# One line a request of the test client would bury what a failing test says.
logging.getLogger("httpx").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _queue_is_looked_at_anew() -> None:
    """Let no test see the queue of the one before: the API believes a look for two seconds."""
    if "fulfillment.api.base" in sys.modules:
        sys.modules["fulfillment.api.base"].FORECASTER._look = None
