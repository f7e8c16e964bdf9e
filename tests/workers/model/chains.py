"""Grammars in which each definition needs the next."""

import json
from collections.abc import Callable

Chain = Callable[[int], str]


def _lark(definition: str, end: str) -> Chain:
    def chain(length: int) -> str:
        lines = [definition.format(number, number + 1) for number in range(length)]
        return "\n".join(
            [f"start: {definition.format(0, 0).partition(':')[0]}", *lines, end.format(length)]
        )

    return chain


def _schema(link: Callable[[str], object]) -> Chain:
    def chain(length: int) -> str:
        definitions = {f"d{number}": link(f"#/$defs/d{number + 1}") for number in range(length)}
        schema = {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{length}": {"type": "integer"}}}
        return json.dumps({"grammars": [{"json_schema": schema}]})

    return chain


CHAINS: dict[str, Chain] = {
    "rules": _lark("r{0}: r{1}", 'r{0}: "b"'),
    "rules and texts": _lark("r{0}: /[a-d]/ r{1}", 'r{0}: "b"'),
    "optional rules": _lark('r{0}: ("a" r{1})?', 'r{0}: "b"'),
    "terminals": _lark('T{0}: "a" T{1}', 'T{0}: "b"'),
    "optional terminals": _lark('T{0}: ("a" T{1})?', 'T{0}: "b"'),
    "terminals and what they are not": _lark('T{0}: "a" ~T{1}', 'T{0}: "b"'),
    "references": _schema(lambda to: {"$ref": to}),
    "references with bounds": _schema(lambda to: {"allOf": [{"$ref": to}, {"minimum": 3}]}),
}


def longest(chain: Chain, num_characters: int) -> str:
    """The longest that is no longer."""
    least, most = 1, num_characters
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (
            (middle, most) if len(chain(middle)) <= num_characters else (least, middle - 1)
        )
    return chain(least)
