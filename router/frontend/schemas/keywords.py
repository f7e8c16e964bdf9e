"""Names the keywords of JSON schemas by what their values are and by what reads them."""

from typing import Final

MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMAS: Final = (
    "items",
    "additionalItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
)
"""Keywords whose values are schemas by name, lists of schemas, or a schema (`items`: both)."""

VALUES: Final = ("const", "enum", "discriminator", "dependentRequired")
"""Keywords whose values are no schemas. References may lead to schemas in unknown keywords."""

REFERENCES: Final = ("$ref", "$dynamicRef", "anyOf", "oneOf", "if", "dependentSchemas")
SAYS_MORE: Final = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "not",
)
"""Keywords that allow or forbid further properties beside `properties`."""

APPLICATORS: Final = (*REFERENCES, "allOf", "then", "else", "not")
"""Keywords whose schemas may evaluate further properties or items."""

FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that llguidance reads."""

UNREADABLE: Final = (
    "if",
    "then",
    "else",
    "not",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "propertyNames",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that llguidance does not read; it ignores annotations and unknown keywords."""

ANNOTATIONS: Final = frozenset(
    (
        "title",
        "description",
        "default",
        "deprecated",
        "example",
        "examples",
        "readOnly",
        "writeOnly",
        "$comment",
        "$id",
        "$anchor",
        "id",
    )
)
KNOWN: Final = frozenset((*MAPS, *LISTS, *SCHEMAS, *VALUES)) | ANNOTATIONS
IN_PLACE: Final = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords whose schemas describe the same value as the keywords beside them."""

READ: Final = frozenset(
    (
        *IN_PLACE,
        "const",
        "enum",
        "type",
        "items",
        "additionalItems",
        "prefixItems",
        "minItems",
        "maxItems",
        "properties",
        "additionalProperties",
        "patternProperties",
        "required",
        "minProperties",
        "maxProperties",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "$defs",
        "definitions",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "readOnly",
        "writeOnly",
        "contentMediaType",
        "contentEncoding",
    )
)
"""Keywords that llguidance applies, and annotations that it knows."""
