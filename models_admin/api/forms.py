"""Bodies of requests."""

from typing import Any

from rest_framework import serializers
from rest_framework.exceptions import ValidationError

from models_admin import services, trial
from models_admin.api.fields import Choice, Form, Number, Object, Path, Switch, Text, Whole
from models_admin.models import (
    CHAT,
    NO_PRIORITY,
    ModelKind,
    PoolKind,
    PriorityStyle,
    Protocol,
    Rebalancing,
    ScoringEndpoint,
)


class ReplicaBounds(Form):
    """How many replicas there may be, and how many there are at first."""

    min = Whole(required=False)
    default = Whole(required=False)
    max = Whole(required=False)


class ModelChanges(Form):
    """Settings of a model that may change; running replicas take them at their next restart."""

    protocol = Choice(choices=Protocol.choices, required=False)
    endpoint = Choice(
        choices=[CHAT, *ScoringEndpoint.values],
        required=False,
        help_text="External, openai: by which endpoint its server scores query and text; chat: it "
        "scores none and is told a prompt",
    )
    url = Text(required=False, max_length=2048, help_text="Of an external server")
    model_name = Text(required=False, max_length=256, help_text="What its server calls it")
    api_key = Text(
        required=False,
        allow_null=True,
        allow_blank=True,
        write_only=True,
        help_text="Sent as bearer token; or env:NAME. Shown as its last characters",
    )
    headers = serializers.DictField(
        child=Text(), required=False, allow_null=True, help_text="Values like api_key"
    )
    timeout_s = Number(required=False)
    max_concurrency = Whole(
        required=False, help_text="Calls an external server may hold; an OIP batch is one"
    )
    sends_priority = Switch(
        required=False,
        help_text="Its server knows priorities, in the direction usual for its protocol",
    )
    priority_style = Choice(
        choices=[NO_PRIORITY, *PriorityStyle.values],
        required=False,
        help_text="External: in whose direction its server is told how urgent a call is",
    )
    version = Text(
        required=False,
        allow_blank=True,
        max_length=128,
        help_text="External: the version that counts from now on, as its server reports it; "
        "empty: ask the server",
    )
    version_label = Text(
        required=False,
        allow_blank=True,
        max_length=128,
        help_text="External: your name for what it serves; another name is another archive key",
    )
    pool = Text(required=False, allow_null=True, max_length=64)
    loader = Text(required=False, max_length=32)
    checkpoint = Path(
        required=False, help_text="pkg:PACKAGE/PATH, or a path under AIRS_CHECKPOINT_ROOT"
    )
    serving = Object(required=False, help_text="Options of the model server")
    devices_per_replica = Whole(required=False)
    replicas = ReplicaBounds(required=False)
    window = Whole(required=False, help_text="Batches that a replica may hold")
    tunes_window = Switch(
        required=False,
        help_text="The window is where it begins, and becomes the smallest that keeps replicas "
        "busy; false: it stays as it is",
    )
    pinned = Switch(
        required=False,
        help_text="The rebalancer leaves its replicas as they are; false also ends the pin that a "
        "resize leaves for an hour",
    )


class ModelForm(ModelChanges):
    """A new model: hosted from a checkpoint, or external at a URL."""

    id = Text(max_length=64)
    kind = Choice(choices=ModelKind.choices)


class ResizeForm(Form):
    """How many replicas are wanted."""

    replicas = Whole()


class _Rows(serializers.ListSerializer[Any]):
    """Counts rows before it looks at any: each may have errors of its own."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, list) and len(data) > trial.MOST_ROWS:
            raise ValidationError(f"1 to {trial.MOST_ROWS} rows.", code="out_of_range")
        return super().to_internal_value(data)


class TryRow(Form):
    """A row of a model that scores rows."""

    query = Text(max_length=trial.MOST_CHARACTERS, allow_blank=True)
    text = Text(max_length=trial.MOST_CHARACTERS, allow_blank=True)

    class Meta:
        list_serializer_class = _Rows


class TryForm(Form):
    """What a model is asked once."""

    rows = TryRow(many=True, required=False)
    message = Text(
        required=False, max_length=trial.MOST_CHARACTERS, help_text="For a chat model, not `rows`"
    )


class PoolChanges(Form):
    """Settings of a pool."""

    kind = Choice(choices=PoolKind.choices, required=False)
    devices = Whole(required=False, min_value=1, max_value=services.MAX_DEVICES)
    agent = Text(required=False, max_length=64)
    rebalancing = Choice(
        choices=Rebalancing.choices,
        required=False,
        help_text="Whether replicas move between its models; dry_run says only what would move",
    )
    notes = Text(required=False, allow_blank=True, max_length=10_000)


class PoolForm(PoolChanges):
    """A new pool of accelerator devices."""

    id = Text(max_length=64)
