"""Settings that are refused at start, with the name of the variable and a remedy."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from airs_site import settings


@pytest.mark.parametrize(("text", "value"), [("", 0.001), ("0", 0.0), ("0.01", 0.01)])
def test_a_share_is_a_number_within_its_bounds(
    text: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRS_SHADOW_REFRESH", text)

    assert settings._share("AIRS_SHADOW_REFRESH", 0.001, most=0.01) == value


@pytest.mark.parametrize("text", ["0.02", "-0.001", "1 %", "nan"])
def test_any_other_share_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRS_SHADOW_REFRESH", text)

    with pytest.raises(ImproperlyConfigured, match=r"AIRS_SHADOW_REFRESH.*from 0 to 0\.01"):
        settings._share("AIRS_SHADOW_REFRESH", 0.001, most=0.01)
