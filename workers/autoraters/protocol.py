"""What an autorater plug-in is: the values it receives and returns, and its five members.

A plug-in turns rows into one model call and the call's answer into scores. It does no input or
output itself: `workers.model_client` sends the call, the Rating Generator decides what is tried
again. docs/raters.md shows how to write one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Item = Mapping[str, Any]
"""One row: those of the plug-in's key fields that are present (`context` is the only object)."""

KeyLevel = Literal["result", "query", "prompt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RaterSpec:
    """Everything about a rater version that decides a score."""

    rater_id: str
    autorater: str
    plugin_version: str
    model_id: str
    model_version: str
    score_min: float
    score_max: float
    key_level: str = "result"
    integer_scores: bool = False
    prompt_template: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldProblem:
    """One reason why a rater cannot work, at the field of `POST /raters` that causes it."""

    field: str
    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OipCall:
    """One Open Inference Protocol call: string inputs, one string a row.

    `outputs` are the outputs the plug-in cannot do without, one number a row. No others are asked
    for, unless `all_outputs` leaves the choice to the model. `notes` holds what `prepare` wants
    `parse` to know of each row; it is never sent and comes back with the answer.
    """

    inputs: Mapping[str, Sequence[str]]
    outputs: tuple[str, ...]
    all_outputs: bool = False
    notes: Sequence[Mapping[str, Any]] = ()

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class OipAnswer:
    """A complete answer: every wanted output, one finite number a row, in the order of the rows.

    `outputs` also holds what else the model answered, if it has one number a row; `parameters`
    are those of the answer, unchecked.
    """

    outputs: Mapping[str, Sequence[float]]
    model_version: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatCall:
    """One call of an OpenAI-compatible chat model, for one row.

    `options` are further members of the request (`temperature`, `max_tokens`, …); model and
    priority are added when it is sent. `notes` is as in `OipCall`, for the one row.
    """

    messages: Sequence[Mapping[str, str]]
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """The first choice of an answer, as the model gave it: nothing in it is checked."""

    content: str
    finish_reason: str = ""
    refusal: str = ""
    """What the server itself calls a refusal, beside the content."""
    model_version: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)


class Rated(NamedTuple):
    """A valid score of one row; `output` is what else the client gets to see.

    A tuple, as a frozen dataclass takes twice as long to make: there is one for every item.
    """

    score: float
    label: str = ""
    output: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """The model answered this row, but not with a score: `not_finite`, `out_of_range`, …"""

    code: str
    detail: str
    ask_again: bool = False
    """Whether the model may do better when it is asked once more."""
    output: Mapping[str, Any] | None = None
    """What the client gets to see beside the code, the raw answer say."""


class Autorater(Protocol):
    """A plug-in. It holds no state: one instance serves all threads of a process."""

    @property
    def name(self) -> str:
        """The entry point's name; raters refer to it."""

    @property
    def version(self) -> str:
        """Part of the archive's key: change it whenever the same row may get another score."""

    @property
    def protocol(self) -> Literal["oip", "openai"]:
        """How the model is called: `oip` by batches, `openai` by one chat call a row."""

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The row fields that decide the score; the plug-in receives these and no others."""

    @property
    def key_level(self) -> KeyLevel:
        """What one archive entry stands for, unless the rater says otherwise."""

    def check(self, spec: RaterSpec) -> Sequence[FieldProblem]:
        """Return what is wrong with the rater's settings; nothing when it can work."""

    def prepare(self, items: Sequence[Item], spec: RaterSpec) -> OipCall | ChatCall:
        """Return the call that rates these rows, one row an item and in their order.

        An OipCall or a ChatCall, as `protocol` says; of the latter, for one item.
        """

    def parse(
        self, items: Sequence[Item], answer: Any, spec: RaterSpec
    ) -> Sequence[Rated | Unusable]:
        """Return exactly one outcome an item, in their order; `answer` is of the call's kind."""


@runtime_checkable
class RendersPrompt(Protocol):
    """An optional member: what decides the score at the rater's key level `prompt`."""

    def prompt(self, item: Item, spec: RaterSpec) -> str:
        """Return all that the model gets to see of a row, and what is said of it, as one text.

        Pure and quick: intake calls it for every row. Rows of equal text share a rating, so it must
        leave out what differs from call to call (markers, a seed) and hold what ends up in the
        rating without being sent, such as how much was cut.
        """
