"""Does a document follow a schema: the few words of JSON Schema that structural schemas of Kubernetes are made of."""

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
}


def faults(value: Any, schema: dict[str, Any], definitions: dict[str, Any], place: str = "") -> Iterator[str]:
    """What of `value` is against the schema, one line each. Keys that it does not list are, too."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"]]
    if "anyOf" in schema and all(list(faults(value, one, definitions, place)) for one in schema["anyOf"]):
        yield f"{place}: {value!r} is none of what is allowed"
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: {value!r} is not of type {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), definitions, f"{place}[{index}]")
    if isinstance(value, dict):
        yield from _faults_of_keys(value, schema, definitions, place)


def _faults_of_keys(
    value: dict[str, Any], schema: dict[str, Any], definitions: dict[str, Any], place: str
) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{place}: {key} is missing" for key in schema.get("required", []) if key not in value)
    for key, item in value.items():
        if key in properties:
            yield from faults(item, properties[key], definitions, f"{place}.{key}")
        elif others is not None:
            yield from faults(item, others, definitions, f"{place}.{key}")
        elif "anyOf" not in schema:
            yield f"{place}: no key {key!r} is known here"
