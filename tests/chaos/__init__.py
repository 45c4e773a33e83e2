"""The kill suite: see docs/chaos.md."""

import pytest

# Say what was compared also where an assertion of these fails.
for module in ("fail_points", "laws", "scenes", "scenes_of_control", "world"):
    pytest.register_assert_rewrite(f"tests.chaos.{module}")
