"""A validation error of any schema as one sentence: the key, the value, and what is allowed there."""

import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loopline.capacity.hardware import Profile
from loopline.capacity.reports import EngineReport, TransferReport
from loopline.config import ClusterConfig
from loopline.faults import FaultConfig
from loopline.schema_words import Words, _words, cross_fault, fault_text, inner_fault

Small = Annotated[int, Field(ge=1, lt=8)]
Code = Annotated[str, Field(pattern="^[A-Z]$"), Words("one of A to Z")]


BY_CODE = "by_code.[key] is '[key]'; allowed: a mapping of one of A to Z to a mapping with the keys size, kind"


class Strict(BaseModel):
    """As sections and reports are."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Strict):
    """Stands in lists and mappings."""

    size: Small
    kind: Literal["a", True] = "a"

    @model_validator(mode="after")
    def _fits(self) -> "Part":
        if self.size == 7:
            raise inner_fault("size", self.size, "even where kind is a")
        return self


class Secret(Strict):
    """What is in it is not shown."""

    key: int = 0


class Whole(Strict):
    """One place of each sort."""

    name: str = ""
    ratio: Small | float | None = None
    part: Part | None = None
    parts: list[Part] = Field(default_factory=list)
    by_code: Mapping[Code, Part] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)
    secret: Secret | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Whole":
        if self.name.startswith("wrong"):
            raise cross_fault("name", self.name, "right")
        return self


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": 5}, "name is 5; allowed: text (quote numbers)"),
        ({"name": "wrong"}, "name is wrong; allowed: right"),
        ({"ratio": "x"}, "ratio is 'x'; allowed: a whole number, at least 1, below 8 or a number or null"),
        ({"part": {}}, "part.size is missing; needed: a whole number, at least 1, below 8"),
        ({"part": 3}, "part is 3; allowed: null or a mapping with the keys size, kind"),
        ({"part": {"size": 1, "depth": 2}}, "part.depth: no such key; allowed: size, kind"),
        ({"part": {"size": 7}}, "part.size is 7; allowed: even where kind is a"),
        ({"part": {"size": 1, "kind": False}}, "part.kind is False; allowed: a or true"),
        ({"parts": [{"size": 1}, {"size": 9}]}, "parts.1.size is 9; allowed: a whole number, at least 1, below 8"),
        ({"parts": [{"size": 1, "depth": 2}]}, "parts.0.depth: no such key; allowed: size, kind"),
        ({"parts": 3}, "parts is 3; allowed: a list of values, each a mapping with the keys size, kind"),
        ({"by_code": {"A": {"size": 0}}}, "by_code.A.size is 0; allowed: a whole number, at least 1, below 8"),
        (
            {"by_code": {"aa": {"size": 1}}},
            "by_code.aa is 'aa'; allowed: a mapping of one of A to Z to a mapping with the keys size, kind",
        ),
        ({"by_code": 3}, "by_code is 3; allowed: a mapping of one of A to Z to a mapping with the keys size, kind"),
        ({"texts": {"a": 1}}, "texts.a is 1; allowed: text (quote numbers)"),
        ({"texts": {7: "a"}}, "texts.7 is 7; allowed: a mapping of NAME to text (quote numbers)"),
        (
            {"x" * 100: 1},
            "a key of 100 characters: no such key; allowed: name, ratio, part, parts, by_code, texts, secret, m",
        ),
        ({"[key]": 1}, "[key]: no such key; allowed: name, ratio, part, parts, by_code, texts, secret, m"),
        ({"part": {"size": 1, "[key]": 1}}, "part.[key]: no such key; allowed: size, kind"),
        ({"texts": {"[key]": 1}}, "texts.[key] is 1; allowed: text (quote numbers)"),
        ({"by_code": {"[key]": {}}}, BY_CODE),
        (
            {"a b" * 100: 1},
            f"{'a b' * 40}...: no such key; allowed: name, ratio, part, parts, by_code, texts, secret, m",
        ),
        ({"a\nb": 1}, "'a\\nb': no such key; allowed: name, ratio, part, parts, by_code, texts, secret, m"),
        ({"name": "wrong{allowed}"}, "name is wrong{allowed}; allowed: right"),
        ({"name": "wrong\n"}, "name is 'wrong\\n'; allowed: right"),
        (
            {"ratio": "t0ken" * 8},
            "ratio is text of 40 characters; allowed: a whole number, at least 1, below 8 or",
        ),
        ({"name": {"t0ken" * 8: 1}}, "name is a mapping of 1 keys; allowed: text"),
        (
            {"ratio": -(10**5000)},
            "ratio is a value of type int; allowed: a whole number, at least 1, below 8 or a number",
        ),
        ({"secret": {"key": "pass"}}, "secret.key is of type str; allowed: a whole number"),
        ({"secret": "pass"}, "secret is of type str; allowed: null or a mapping with the keys key"),
        ({5: 1}, "5: no such key; allowed: name, ratio, part, parts, by_code, texts, secret, m"),
    ],
)
def test_each_fault_is_one_sentence(value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Whole.model_validate(value)
    fault = raised.value.errors(include_url=False)[0]
    assert fault_text(Whole, fault, more_keys=["more"], secret=["secret"]).startswith(words)


@pytest.mark.parametrize("schema", [ClusterConfig, FaultConfig, Profile, EngineReport, TransferReport])
def test_every_field_has_words(schema: type[BaseModel]) -> None:
    for field in schema.model_fields.values():
        assert _words(field.annotation, field.metadata)
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                test_every_field_has_words(part)
