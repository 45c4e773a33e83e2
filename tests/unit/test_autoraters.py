"""The plug-ins that ship, and what they make of a model's answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.autoraters import OipAnswer, OipCall, Rated, RaterSpec, Unusable
from workers.autoraters.needs_met import LABELS, NeedsMet
from workers.autoraters.oip_score import OipScore
from workers.autoraters.protocol import RendersPrompt

SPEC = RaterSpec(
    rater_id="needs",
    autorater="needs_met",
    plugin_version="1",
    model_id="minilm",
    model_version="abc",
    score_min=0.0,
    score_max=4.0,
)
ROW: Mapping[str, Any] = {"query_text": "rain jacket", "title": "Jackets", "text": "Dry at last."}


def answer_to(call: OipCall, *scores: float, **others: Sequence[float]) -> OipAnswer:
    return OipAnswer(outputs={"score": scores, **others}, notes=call.notes)


@pytest.mark.parametrize("plugin", [NeedsMet(), OipScore()], ids=lambda plugin: plugin.name)
class TestWhatTheyShare:
    def test_a_call_has_the_query_and_the_text_of_each_row_in_order(
        self, plugin: NeedsMet | OipScore
    ) -> None:
        page = {"query_text": "boots", "html": "<p>Leather<p>Rubber"}

        call = plugin.prepare([ROW, page], SPEC)

        assert call.inputs == {
            "query": ["rain jacket", "boots"],
            "text": ["Jackets\nDry at last.", "Leather\nRubber"],
        }
        assert call.outputs == ("score",)
        assert call.rows == 2

    def test_every_row_gets_one_outcome(self, plugin: NeedsMet | OipScore) -> None:
        call = plugin.prepare([ROW] * 3, SPEC)

        outcomes = plugin.parse([ROW] * 3, answer_to(call, 0.5, nan, 1.0), SPEC)

        assert [type(outcome) for outcome in outcomes] == [Rated, Unusable, Rated]

    def test_a_text_that_was_cut_is_flagged_with_its_lengths(
        self, plugin: NeedsMet | OipScore
    ) -> None:
        spec = replace(SPEC, config={"max_text_chars": 10})
        call = plugin.prepare([ROW, {"query_text": "q", "text": "short"}], spec)

        cut, whole = plugin.parse([ROW, ROW], answer_to(call, 0.5, 0.5), spec)

        assert isinstance(cut, Rated)
        assert cut.warnings == ("input_truncated",)
        assert cut.output == {
            "input_truncated": True,
            "lengths": {"characters": {"original": 20, "used": 10}},
        }
        assert isinstance(whole, Rated)
        assert (whole.warnings, whole.output) == ((), None)

    def test_a_model_that_tells_its_tokens_is_believed(self, plugin: NeedsMet | OipScore) -> None:
        call = plugin.prepare([ROW, ROW], SPEC)
        counts = {"tokens": [300.0, 256.0], "query_tokens": [400.0, 5.0]}
        answer = replace(answer_to(call, 0.5, 0.5, **counts), parameters={"max_tokens": 256})

        cut, whole = plugin.parse([ROW, ROW], answer, SPEC)

        assert isinstance(cut, Rated)
        assert cut.output is not None
        assert cut.output["lengths"] == {
            "tokens": {"original": 300, "used": 256},
            "query_tokens": {"original": 400, "used": 256},
        }
        assert isinstance(whole, Rated)
        assert whole.warnings == ()

    @pytest.mark.parametrize("parameters", [{}, {"max_tokens": "256"}, {"max_tokens": None}])
    def test_token_counts_without_a_limit_say_nothing(
        self, plugin: NeedsMet | OipScore, parameters: dict[str, Any]
    ) -> None:
        call = plugin.prepare([ROW], SPEC)
        answer = replace(answer_to(call, 0.5, tokens=[300.0]), parameters=parameters)

        (rated,) = plugin.parse([ROW], answer, SPEC)

        assert isinstance(rated, Rated)
        assert rated.warnings == ()

    def test_a_row_without_any_text_is_rated_and_says_so(self, plugin: NeedsMet | OipScore) -> None:
        empty = {"query_text": "no page", "html": "<p> </p>"}
        call = plugin.prepare([empty], SPEC)

        (rated,) = plugin.parse([empty], answer_to(call, 0.0), SPEC)

        assert call.inputs["text"] == [""]
        assert isinstance(rated, Rated)
        assert rated.warnings == ("no_text",)

    @pytest.mark.parametrize("score", [nan, inf, -inf])
    def test_what_is_no_number_is_no_score(self, plugin: NeedsMet | OipScore, score: float) -> None:
        call = plugin.prepare([ROW], SPEC)

        (outcome,) = plugin.parse([ROW], answer_to(call, score), SPEC)

        assert isinstance(outcome, Unusable)
        assert outcome.code == "not_finite"

    def test_settings_that_can_work_have_no_problem(self, plugin: NeedsMet | OipScore) -> None:
        assert plugin.check(replace(SPEC, config={"max_text_chars": 500})) == []

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"score_max": 0.0}, ("score_max", "empty_scale")),
            ({"score_min": nan}, ("score_min", "not_finite")),
            ({"score_max": inf}, ("score_min", "not_finite")),
            ({"key_level": "query"}, ("key_level", "not_supported")),
            ({"prompt_template": "Rate {text}"}, ("prompt_template", "not_supported")),
            ({"config": {"max_chars": 5}}, ("config.max_chars", "unknown_setting")),
            ({"config": {"max_text_chars": 0}}, ("config.max_text_chars", "out_of_range")),
            ({"config": {"max_text_chars": True}}, ("config.max_text_chars", "out_of_range")),
            ({"config": {"max_text_chars": "9"}}, ("config.max_text_chars", "out_of_range")),
        ],
    )
    def test_settings_that_cannot_work_are_named(
        self, plugin: NeedsMet | OipScore, change: dict[str, Any], problem: tuple[str, str]
    ) -> None:
        (found,) = plugin.check(replace(SPEC, **change))

        assert (found.field, found.code) == problem


@pytest.mark.parametrize("plugin", [NeedsMet(), OipScore()], ids=lambda plugin: plugin.name)
class TestPrompt:
    """What decides at key level `prompt` is what is sent, and what is told of it."""

    SPEC = replace(SPEC, key_level="prompt", config={"max_text_chars": 20})

    def test_the_level_is_supported(self, plugin: NeedsMet | OipScore) -> None:
        assert isinstance(plugin, RendersPrompt)
        assert plugin.check(self.SPEC) == []

    def test_pages_of_equal_visible_text_are_equal(self, plugin: NeedsMet | OipScore) -> None:
        pages = ["<p>to <b>read</b></p>", "<p class='x'>to read</p><script>1</script>"]
        rows = [{"query_text": "q", "html": page} for page in pages]

        assert len({plugin.prompt(row, self.SPEC) for row in rows}) == 1

    @pytest.mark.parametrize(
        "other",
        [{"query_text": "r"}, {"text": "other"}, {"text": "x" * 21}, {"text": "x" * 22}, {}],
        ids=str,
    )
    def test_what_is_sent_or_told_otherwise_differs(
        self, plugin: NeedsMet | OipScore, other: dict[str, str]
    ) -> None:
        one = {"query_text": "q", "text": "x" * 20}

        assert (plugin.prompt({**one, **other}, self.SPEC) == plugin.prompt(one, self.SPEC)) == (
            not other
        )


def test_needs_met_leaves_the_outputs_to_the_model_and_oip_score_does_not() -> None:
    assert NeedsMet().prepare([ROW], SPEC).all_outputs
    assert not OipScore().prepare([ROW], SPEC).all_outputs


def rate_cosine(cosine: float, spec: RaterSpec = SPEC) -> Rated | Unusable:
    call = NeedsMet().prepare([ROW], spec)
    (outcome,) = NeedsMet().parse([ROW], answer_to(call, cosine), spec)
    return outcome


@pytest.mark.parametrize(
    ("cosine", "score", "label"),
    [
        (-1.0, 0.0, "Fails to meet"),
        (0.0, 0.0, "Fails to meet"),
        (0.1999, 0.7996, "Fails to meet"),
        (0.2, 0.8, "Slightly meets"),
        (0.5, 2.0, "Moderately meets"),
        (0.6, 2.4, "Highly meets"),
        (0.8, 3.2, "Fully meets"),
        (1.0, 4.0, "Fully meets"),
        (1.0000002, 4.0, "Fully meets"),
    ],
)
def test_a_cosine_becomes_its_place_on_the_scale(cosine: float, score: float, label: str) -> None:
    rated = rate_cosine(cosine)

    assert isinstance(rated, Rated)
    assert rated.score == pytest.approx(score)
    assert rated.label == label


def test_the_scale_may_begin_anywhere() -> None:
    rated = rate_cosine(0.5, replace(SPEC, score_min=-1.0, score_max=1.0))

    assert isinstance(rated, Rated)
    assert rated.score == 0.0


@pytest.mark.parametrize("cosine", [1.01, -1.01, 3.7])
def test_a_number_that_is_no_cosine_is_refused(cosine: float) -> None:
    outcome = rate_cosine(cosine)

    assert isinstance(outcome, Unusable)
    assert outcome.code == "out_of_range"


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_a_nearer_text_never_scores_lower(one: float, other: float) -> None:
    low, high = rate_cosine(min(one, other)), rate_cosine(max(one, other))

    assert isinstance(low, Rated)
    assert isinstance(high, Rated)
    assert 0 <= low.score <= high.score <= 4
    assert LABELS.index(low.label) <= LABELS.index(high.label)


def test_needs_met_refuses_whole_numbers_because_a_cosine_is_none() -> None:
    (problem,) = NeedsMet().check(replace(SPEC, integer_scores=True))

    assert problem.field == "integer_scores"


def rate_number(score: float, **changes: Any) -> Rated | Unusable:
    spec = replace(SPEC, autorater="oip_score", **changes)
    call = OipScore().prepare([ROW], spec)
    (outcome,) = OipScore().parse([ROW], answer_to(call, score), spec)
    return outcome


@pytest.mark.parametrize("score", [0.0, 1.25, 4.0])
def test_a_score_on_the_scale_stays_as_answered(score: float) -> None:
    assert rate_number(score) == Rated(score=score)


@pytest.mark.parametrize("score", [-0.001, 4.001, 100.0])
def test_a_score_off_the_scale_is_refused_and_never_clamped(score: float) -> None:
    outcome = rate_number(score)

    assert isinstance(outcome, Unusable)
    assert outcome.code == "out_of_range"


def test_a_fraction_is_refused_where_whole_numbers_are_asked() -> None:
    assert rate_number(3.0, integer_scores=True) == Rated(score=3.0)
    outcome = rate_number(2.5, integer_scores=True)

    assert isinstance(outcome, Unusable)
    assert outcome.code == "not_integer"
