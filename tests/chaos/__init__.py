"""The kill suite: see docs/chaos.md."""

import pytest

# Say what was compared also where an assertion of these fails.
for module in (
    "fail_points", "laws", "scenes", "scenes_of_archive", "scenes_of_control", "scenes_of_keeping",
    "world",
):  # fmt: skip
    pytest.register_assert_rewrite(f"tests.chaos.{module}")
