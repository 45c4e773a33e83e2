"""docs/raters.md: its plug-in works as printed."""

import re
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.autoraters import Autorater, OipAnswer, OipCall, Rated, RaterSpec, Unusable
from workers.autoraters.needs_met import DEFAULT_TEXT_CHARS, LABELS
from workers.autoraters.oip_score import DEFAULT_TEXT_CHARS as OIP_TEXT_CHARS
from workers.autoraters.page_text import MAX_HTML_TAGS
from workers.model_client import CallOutcome

PAGE = (Path(__file__).parent.parent.parent / "docs" / "raters.md").read_text()
SPEC = RaterSpec(
    rater_id="titles",
    autorater="title_quality",
    plugin_version="1",
    model_id="m",
    model_version="1",
    score_min=0.0,
    score_max=4.0,
)


def printed_plugin() -> Autorater:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("title_quality")
    exec(compile(code, "docs/raters.md", "exec"), module.__dict__)
    plugin: Autorater = module.TitleQuality()
    return plugin


def test_the_printed_plugin_has_every_member_of_the_protocol() -> None:
    plugin = printed_plugin()

    members = {name for name in vars(Autorater) if not name.startswith("_")}
    assert members == {name for name in members if hasattr(plugin, name)}
    assert plugin.check(SPEC) == []


def test_the_printed_plugin_rates_a_batch() -> None:
    plugin = printed_plugin()
    items: list[dict[str, Any]] = [
        {"title": "Boots", "text": "Leather boots"},
        {"text": "no title"},
        {"title": "Odd", "text": "odd"},
    ]

    call = plugin.prepare(items, SPEC)
    assert isinstance(call, OipCall)
    answer = OipAnswer(outputs={"probability": [0.75, 0.5, nan]}, notes=call.notes)
    good, untitled, odd = plugin.parse(items, answer, SPEC)

    assert call.rows == 3
    assert good == Rated(score=3.0, label="good")
    assert isinstance(untitled, Unusable)
    assert isinstance(odd, Unusable)


def test_the_page_names_every_outcome_label_and_limit() -> None:
    missing = [
        word
        for word in (
            *(f"`{outcome}`" for outcome in CallOutcome),
            *LABELS,
            f"{DEFAULT_TEXT_CHARS:,} for `needs_met`",
            f"{OIP_TEXT_CHARS:,} for `oip_score`",
            f"{MAX_HTML_TAGS:,} tags",
        )
        if word not in PAGE
    ]

    assert missing == []
