"""What is wrong in a cluster's YAML file, in words: `loopline.config` raises, here is what it says.

Nothing secret is in them, though the file may hold it in a wrong place.
"""

from typing import Any

from loopline.config_sections import Section
from loopline.schema_words import fault_text
from loopline.security import MIN_TOKEN_CHARS


def shown(key: str) -> str:
    """A key for people; one as long as a token may be one, in the wrong place."""
    return f"the key {key!r}" if len(key) < MIN_TOKEN_CHARS else _hidden(key)


def file_fault(schema: type[Section], fault: Any) -> str:
    """One of a validation error's `errors()` as one sentence."""
    is_secret = fault["loc"][:1] == ("security",)
    return fault_text(
        schema,
        fault,
        key_text=lambda key: key if len(key) < MIN_TOKEN_CHARS else _hidden(key),
        value_text=lambda value: f"of type {type(value).__name__}" if is_secret else repr(value),
    )


def _hidden(key: str) -> str:
    return f"a key of {len(key)} characters"
