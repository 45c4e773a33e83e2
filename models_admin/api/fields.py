"""Strict fields of bodies, and forms that refuse unknown ones."""

from collections.abc import Mapping
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ValidationError


def typed(data: Any, kind: type, words: str) -> None:
    """Refuse another JSON type: values are never coerced (true is no number, "1" neither)."""
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValidationError(f"Must be {words}.", code="bad_type")


class Text(serializers.CharField):
    """A string, kept as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        typed(data, str, "a string")
        return super().to_internal_value(data)


class Whole(serializers.IntegerField):
    """A whole number."""

    def to_internal_value(self, data: Any) -> int:
        typed(data, int, "a whole number")
        return super().to_internal_value(data)


class Number(serializers.FloatField):
    """A number."""

    def to_internal_value(self, data: Any) -> float:
        typed(data, int | float, "a number")  # type: ignore[arg-type]
        return super().to_internal_value(data)


class Switch(serializers.BooleanField):
    """True or false."""

    def to_internal_value(self, data: Any) -> bool:
        typed(data, bool, "true or false")
        return super().to_internal_value(data)


class Choice(serializers.ChoiceField):
    """One of some strings."""

    def to_internal_value(self, data: Any) -> Any:
        typed(data, str, "a string")
        return super().to_internal_value(data)


class Object(serializers.JSONField):
    """A JSON object."""

    def to_internal_value(self, data: Any) -> Any:
        typed(data, dict, "an object")
        return super().to_internal_value(data)


@extend_schema_field(OpenApiTypes.STR)
class Path(serializers.Field[str, Any, str, Any]):
    """Text that the checkpoint's own rule judges, control characters and all."""

    def to_internal_value(self, data: Any) -> str:
        typed(data, str, "a string")
        return str(data)

    def to_representation(self, value: str) -> str:
        return value


class Form(serializers.Serializer[Any]):
    """A body whose unknown fields are refused by name."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping) and (unknown := set(data) - set(self.fields)):
            detail = f"The fields are {', '.join(sorted(self.fields))}."
            raise ValidationError(
                {
                    str(name)[:100]: [serializers.ErrorDetail(detail, code="unknown_field")]
                    for name in sorted(unknown, key=str)
                }
            )
        return super().to_internal_value(data)
