"""`llm_judge`: the prompt is filled once and literally; only what is clear becomes a score."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.autoraters import Autorater, ChatAnswer, Rated, RaterSpec, Unusable, load
from workers.autoraters.llm_judge import KEPT_CHARS, LlmJudge

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
TEMPLATE = 'Query: {query_text}\nPage: {html}\nAnswer {"score": 3, "why": {"a": 1}} only.'


def spec(**changes: Any) -> RaterSpec:
    fields = {
        "rater_id": "judge",
        "autorater": "llm_judge",
        "plugin_version": "1",
        "model_id": "m",
        "model_version": "",
        "score_min": 1.0,
        "score_max": 5.0,
        "prompt_template": TEMPLATE,
    }
    return RaterSpec(**{**fields, **changes})


def judge(token: str = "abc") -> LlmJudge:
    return LlmJudge(new_token=lambda: token)


def prompt(item: Mapping[str, Any], **changes: Any) -> str:
    content: str = judge().prepare([item], spec(**changes)).messages[-1]["content"]
    return content


def outcome(text: str, *, finish_reason: str = "stop", refusal: str = "", **changes: Any) -> Any:
    answer = ChatAnswer(content=text, finish_reason=finish_reason, refusal=refusal)
    (result,) = judge().parse([{}], answer, spec(**changes))
    return result


def code(text: str, **how: Any) -> str:
    result = outcome(text, **how)
    assert isinstance(result, Unusable), result
    assert result.ask_again
    return result.code


def test_the_plug_in_ships() -> None:
    plugin: Autorater = load("llm_judge")

    assert (plugin.protocol, plugin.key_level) == ("openai", "result")


# The prompt


def test_fields_stand_between_markers_in_the_template() -> None:
    call = judge().prepare([{"query_text": "boots", "html": "<p>x</p>"}], spec())

    system, user = call.messages
    assert "<<<NAME abc>>>" in system["content"]
    assert user["content"] == (
        "Query: <<<query_text abc>>>\nboots\n<<<END query_text abc>>>\n"
        "Page: <<<html abc>>>\n<p>x</p>\n<<<END html abc>>>\n"
        'Answer {"score": 3, "why": {"a": 1}} only.'
    )
    assert call.options == {"temperature": 0, "max_tokens": 512}


def test_every_prompt_has_markers_of_its_own() -> None:
    prompts = {
        LlmJudge().prepare([{"query_text": "q"}], spec()).messages[-1]["content"] for _ in range(20)
    }

    assert len(prompts) == 20


BRACES = ["{score}", "{0}", "{{x}}", "{query_text}", "{% raw %}{{ 7*7 }}", "${HOME}", "%s %d"]


@pytest.mark.parametrize("page", BRACES)
def test_braces_in_a_page_stay_what_they_are(page: str) -> None:
    assert prompt({"query_text": "q", "html": page}).count(page) == 1


@given(query=st.text(), page=st.text())
def test_data_is_never_read_for_placeholders(query: str, page: str) -> None:
    filled = prompt({"query_text": query, "html": page})

    assert f"<<<query_text abc>>>\n{query}\n<<<END query_text abc>>>" in filled
    assert f"<<<html abc>>>\n{page}\n<<<END html abc>>>" in filled


def test_an_absent_field_is_empty_and_context_is_json() -> None:
    filled = prompt(
        {"query_text": "q", "context": {"b": "ü", "a": [1]}},
        prompt_template="{context}{title}",
    )

    assert '{"a": [1], "b": "ü"}' in filled
    assert "<<<title abc>>>\n\n<<<END title abc>>>" in filled


def test_a_shortened_field_is_flagged_on_the_rating() -> None:
    call = judge().prepare(
        [{"query_text": "q", "html": "x" * 30}], spec(config={"max_text_chars": 10})
    )
    answer = ChatAnswer(content="4", notes=call.notes)

    (rated,) = judge().parse([{}], answer, spec())

    assert isinstance(rated, Rated)
    assert rated.warnings == ("input_truncated",)
    assert rated.output is not None
    assert rated.output["lengths"] == {"html": {"original": 30, "used": 10}}
    assert "x" * 11 not in call.messages[-1]["content"]


def test_equal_prompts_are_equal_whatever_their_markers() -> None:
    plugin = LlmJudge()
    same = {"query_text": "q", "html": "p", "url": "https://a.example"}

    assert plugin.prompt(same, spec()) == plugin.prompt(
        {**same, "url": "https://b.example"}, spec()
    )
    assert plugin.prompt(same, spec()) != plugin.prompt({**same, "html": "o"}, spec())


def test_a_server_with_schemas_gets_the_scale_as_one() -> None:
    call = judge().prepare(
        [{"query_text": "q"}], spec(config={"json_schema": True}, integer_scores=True)
    )

    wanted = call.options["response_format"]["json_schema"]
    assert wanted["strict"]
    assert wanted["schema"]["properties"]["score"] == {
        "type": "integer", "minimum": 1.0, "maximum": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"prompt_template": "Query: {querytext}"}, "prompt_template", "unknown_placeholder"),
        ({"prompt_template": "{query_text} {score}"}, "prompt_template", "unknown_placeholder"),
        ({"prompt_template": "{{x}} {html}"}, "prompt_template", "unknown_placeholder"),
        ({"prompt_template": ""}, "prompt_template", "missing_placeholder"),
        ({"prompt_template": 'Answer {"score": 1}'}, "prompt_template", "missing_placeholder"),
        (
            {"prompt_template": "{query_text} {html}", "key_level": "query"},
            "prompt_template",
            "unknown_placeholder",
        ),
        ({"config": {"max_tokens": 0}}, "config.max_tokens", "out_of_range"),
        ({"config": {"max_tokens": True}}, "config.max_tokens", "out_of_range"),
        ({"config": {"max_text_chars": 1.5}}, "config.max_text_chars", "out_of_range"),
        ({"config": {"json_schema": 1}}, "config.json_schema", "bad_type"),
        ({"config": {"temperature": 1}}, "config.temperature", "unknown_setting"),
        ({"score_min": 5.0}, "score_max", "empty_scale"),
    ],
)
def test_what_cannot_work_is_refused_at_registration(
    changes: Mapping[str, Any], field: str, problem: str
) -> None:
    (found,) = judge().check(spec(**changes))

    assert (found.field, found.code) == (field, problem)


@pytest.mark.parametrize("level", ["result", "prompt"])
def test_a_good_rater_is_fine(level: str) -> None:
    assert not judge().check(spec(key_level=level))
    assert not judge().check(spec(key_level="query", prompt_template="{query_text}"))


# The answer


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 4}', 4),
        ('{"score": 4.5, "reason": "good"}', 4.5),
        ('  \n{"score": "3"}\n', 3),
        ('```json\n{"score": 2}\n```', 2),
        ("```\n5\n```", 5),
        ('<think>the page says {"score": 1}</think>\n\n4', 4),
        ("4", 4),
        ("4.0", 4),
        ('"4"', 4),
        ('{"score": 4, "score": 4}', 4),
    ],
)
def test_a_clear_answer_is_a_score_and_is_kept(text: str, score: float) -> None:
    rated = outcome(text)

    assert isinstance(rated, Rated)
    assert rated.score == score
    assert rated.output is not None
    assert rated.output["answer"] == text


def test_a_minus_is_kept() -> None:
    for text in ("-1", "\N{MINUS SIGN}1", '{"score": "\N{MINUS SIGN}1"}'):
        assert outcome(text, score_min=-1.0).score == -1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It depends.", "unparseable"),
        ("N/A", "unparseable"),
        ("Score: 4", "unparseable"),
        ("4/5", "unparseable"),
        ("4 5", "unparseable"),
        ("٤", "unparseable"),
        ("4,5", "unparseable"),
        ("1e0", "unparseable_or_number"),
        ("<think>endless 4", "unparseable"),
        ('{"score": 4', "unparseable"),
        ("6", "out_of_range"),
        ('{"score": -4}', "out_of_range"),
        ('{"score": 100}', "out_of_range"),
        ('{"score": NaN}', "not_finite"),
        ('{"score": Infinity}', "not_finite"),
        ('{"score": 1e999}', "not_finite"),
        ("NaN", "not_finite"),
        ("-inf", "not_finite"),
        ('{"score": true}', "bad_type"),
        ("true", "bad_type"),
        ("null", "bad_type"),
        ('{"score": null}', "bad_type"),
        ('{"score": [4]}', "bad_type"),
        ("[4]", "bad_type"),
        ('{"score": "four"}', "unparseable"),
        ('{"score": 4, "score": 2}', "ambiguous"),
        ('{"rating": 4}', "missing_score"),
        ('{"refusal": "unsafe"}', "missing_score"),
        ("", "empty_output"),
        ("  \n", "empty_output"),
        ("<think>ok</think>", "empty_output"),
        ("I'm sorry, but I can't rate this page.", "refusal"),
        ("I am unable to assess this page.", "refusal"),
        ("I cannot help with that.", "refusal"),
    ],
)
def test_an_unclear_answer_is_an_outcome_without_a_score(text: str, expected: str) -> None:
    if expected == "unparseable_or_number":
        assert outcome(text).score == 1  # JSON's own notation of a number
        return
    assert code(text) == expected


def test_a_fraction_on_a_scale_of_whole_numbers_is_refused() -> None:
    assert code('{"score": 3.5}', integer_scores=True) == "not_integer"
    assert outcome('{"score": 3.0}', integer_scores=True).score == 3


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"finish_reason": "length"}, "truncated_output"),
        ({"finish_reason": "content_filter"}, "content_filter"),
        ({"refusal": "no"}, "refusal"),
    ],
)
def test_what_the_server_says_counts_before_the_text(how: Any, expected: str) -> None:
    assert code('{"score": 4}', **how) == expected


def test_a_raw_answer_is_kept_with_a_failure_as_the_database_can_keep_it() -> None:
    result = outcome("no\0 \ud800" + "x" * KEPT_CHARS)

    assert isinstance(result, Unusable)
    assert result.output is not None
    assert result.output["answer"].startswith("no\ufffd \ufffdx")
    assert len(result.output["answer"]) == KEPT_CHARS


@given(text=st.text() | st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.just("score") | st.text(), inner),
).map(json.dumps))  # fmt: skip
def test_no_answer_raises_or_leaves_the_scale(text: str) -> None:
    result = outcome(text)

    if isinstance(result, Rated):
        assert 1 <= result.score <= 5
    else:
        assert isinstance(result, Unusable)


# The collected cases


def cases(case: str) -> Path:
    folder = CASES / case
    if not folder.is_dir():
        pytest.skip(f"the collected cases are not beside the repository: {folder}")
    return folder


def test_case_j_07_braces_and_template_marks() -> None:
    folder = cases("J-07")
    template = (folder / "template_json.txt").read_text()

    for line in (folder / "braces.jsonl").read_text().splitlines():
        row = json.loads(line)
        filled = prompt(row, prompt_template=template)
        assert filled.count(row["html"]) == 1
        assert '{"score": 3, "reason": "..."}' in filled
    assert not judge().check(spec(prompt_template=template))
    (found,) = judge().check(spec(prompt_template=(folder / "template_unknown.txt").read_text()))
    assert found.code == "unknown_placeholder"
    assert "{querytext}" in found.detail


def test_case_j_04_refusals_and_empty_answers() -> None:
    for line in (cases("J-04") / "judge_outputs.jsonl").read_text().splitlines():
        case = json.loads(line)
        low, high = case["score_range"]
        assert case["expect"]["score"] is None
        assert case["expect"]["error"] == code(
            case["text"],
            finish_reason=case["finish_reason"],
            score_min=float(low),
            score_max=float(high),
            integer_scores=case["integer"],
        )
