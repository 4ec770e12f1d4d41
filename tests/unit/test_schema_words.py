"""A validation error of any schema as one sentence: the key, the value, and what is allowed there."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loopline.schema_words import Words, cross_fault, fault_text

Small = Annotated[int, Field(ge=1, lt=8)]
Code = Annotated[str, Field(pattern="^[A-Z]$"), Words("one of A to Z")]


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
            raise ValueError("size is 7; allowed: even where kind is a")
        return self


class Whole(Strict):
    """One place of each sort."""

    name: str = ""
    ratio: Small | float | None = None
    part: Part | None = None
    parts: list[Part] = Field(default_factory=list)
    by_code: Mapping[Code, Part] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> "Whole":
        if self.name == "wrong":
            raise cross_fault("name", self.name, "right")
        return self


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"name": 5}, "name is 5; allowed: text (quote numbers)"),
        ({"name": "wrong"}, "name is wrong; allowed: right"),
        ({"ratio": "x"}, "ratio is 'x'; allowed: a whole number, at least 1, below 8 or a number or null"),
        ({"part": {}}, "part.size is missing; needed: a whole number, at least 1, below 8"),
        ({"part": 3}, "part is 3; allowed: a mapping with the keys size, kind or null"),
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
        ({"x" * 100: 1}, f"{'x' * 60}...: no such key; allowed: name, ratio, part, parts, by_code, texts, more"),
        ({5: 1}, "5: no such key; allowed: name, ratio, part, parts, by_code, texts, more"),
    ],
)
def test_each_fault_is_one_sentence(value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Whole.model_validate(value)
    fault = raised.value.errors(include_url=False)[0]
    assert fault_text(Whole, fault, more_keys=["more"]) == words
