"""How plug-ins are found, described and refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from workers import autoraters
from workers.autoraters import BrokenAutorater, RaterSpec, UnknownAutorater, registry
from workers.autoraters.description import describe
from workers.autoraters.needs_met import NeedsMet

PLUGIN = """
class {name}:
    name, version, protocol = {named!r}, "7", "oip"
    key_fields, key_level = ("query_text",), "query"
    def check(self, spec): return []
    def prepare(self, items, spec): raise NotImplementedError
    def parse(self, items, answer, spec): raise NotImplementedError
"""


class Packages:
    """Installs distributions that offer plug-ins, for one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def install(self, distribution: str, entry_points: str, code: str = "") -> None:
        info = self.directory / f"{distribution}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{entry_points}\n")
        (self.directory / f"{distribution}_plugins.py").write_text(code)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(tmp_path)
    registry.load.cache_clear()
    yield Packages(tmp_path)
    registry.load.cache_clear()


@pytest.mark.parametrize("name", ["needs_met", "oip_score"])
def test_the_plugins_that_ship_are_installed(name: str) -> None:
    assert autoraters.load(name).name == name
    assert name in autoraters.available()


def test_a_description_holds_what_intake_needs() -> None:
    description = describe("needs_met")

    assert description.key_fields == ("query_text", "title", "html", "text")
    assert (description.version, description.key_level, description.protocol) == (
        NeedsMet.version,
        "result",
        "oip",
    )


def test_a_description_checks_settings() -> None:
    spec = RaterSpec(
        rater_id="r",
        autorater="needs_met",
        plugin_version="1",
        model_id="m",
        model_version="1",
        score_min=1.0,
        score_max=1.0,
    )

    assert [problem.code for problem in describe("needs_met").check(spec)] == ["empty_scale"]


def test_an_unknown_name_says_which_are_known_and_how_plugins_are_installed() -> None:
    with pytest.raises(UnknownAutorater, match="needs_met, oip_score") as caught:
        autoraters.load("needs_mat")

    assert "pip install -e ." in str(caught.value)


def test_a_package_of_ones_own_adds_a_plugin(packages: Packages) -> None:
    code = PLUGIN.format(name="Mine", named="mine")
    packages.install("tests_good", "mine = tests_good_plugins:Mine", code)

    assert autoraters.load("mine").version == "7"
    assert {"mine", "needs_met"} <= set(autoraters.available())


def test_a_broken_plugin_is_left_out_and_costs_the_others_nothing(packages: Packages) -> None:
    packages.install("tests_bad", "bad = tests_bad_plugins:Bad", "import no_such_module")

    with pytest.raises(BrokenAutorater, match="no_such_module"):
        autoraters.load("bad")
    assert "bad" not in autoraters.available()
    assert "needs_met" in autoraters.available()


def test_a_plugin_under_a_foreign_name_is_refused(packages: Packages) -> None:
    code = PLUGIN.format(name="Mine", named="other")
    packages.install("tests_named", "mine = tests_named_plugins:Mine", code)

    with pytest.raises(BrokenAutorater, match="other"):
        autoraters.load("mine")


def test_two_packages_must_not_offer_one_name(packages: Packages) -> None:
    for distribution in ("tests_one", "tests_two"):
        code = PLUGIN.format(name="Same", named="same")
        packages.install(distribution, f"same = {distribution}_plugins:Same", code)

    with pytest.raises(BrokenAutorater, match="several packages"):
        autoraters.load("same")
