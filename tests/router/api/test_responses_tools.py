"""Tests the names of tools and the types of tools and items of the Responses API."""

from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseInputItemParam, ToolParam
from pydantic import TypeAdapter, ValidationError

from tandem.proto.limits import MAX_TOOL_NAME_CHARACTERS
from tandem.router.api.responses.items import Item
from tandem.router.api.responses.tool_bodies import FunctionTool, NamespaceTool, Tool
from tandem.router.api.responses.tools import OfferedTools, custom_arguments, custom_input

NAMES = st.one_of(
    st.text("ab_", min_size=1, max_size=4),
    st.sampled_from(["x" * 40, "x" * 41, "x" * 64, "x__y", "x_"]),
)


def function(namespace: str, name: str) -> Tool:
    """Returns a function, alone in its namespace if it has one."""
    tool = {"type": "function", "name": name}
    if not namespace:
        return FunctionTool.model_validate(tool)
    return NamespaceTool.model_validate({"type": "namespace", "name": namespace, "tools": [tool]})


@given(st.sets(st.tuples(st.one_of(st.just(""), NAMES), NAMES), min_size=1, max_size=12))
def test_names_of_tools_are_unique_and_lead_back_to_the_tools(keys: set[tuple[str, str]]) -> None:
    offered = OfferedTools(("tools", function(*key)) for key in sorted(keys))
    found = list(offered)
    assert {(each.namespace, each.tool.name) for each in found} == keys
    assert len({each.model_name for each in found}) == len(keys)
    for each in found:
        assert 1 <= len(each.model_name) <= MAX_TOOL_NAME_CHARACTERS
        assert offered.called(each.model_name) is each
        # A later request has the same name for a call of this tool.
        assert offered.model_name(each.namespace, each.tool.name) == each.model_name
    assert all(each.model_name == each.tool.name for each in found if not each.namespace)


def test_the_name_in_a_namespace_does_not_depend_on_the_offered_tools() -> None:
    for namespace, name in (("mcp__files__", "read"), ("n" * 60, "read")):
        (offered,) = OfferedTools([("tools[0]", function(namespace, name))])
        assert OfferedTools([]).model_name(namespace, name) == offered.model_name
    assert OfferedTools([]).model_name("mcp__files__", "read") == "mcp__files__read"


@given(st.text())
def test_the_input_of_a_custom_tool_comes_back(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text


@pytest.mark.parametrize("arguments", ["", "x", "[]", '{"input": 1}', '{"text": "x"}', "[" * 9_999])
def test_other_arguments_of_a_custom_tool_come_back_unchanged(arguments: str) -> None:
    assert custom_input(arguments) == arguments


def types_of(union: Any) -> set[str]:
    """Returns the types that a union of the openai package has."""
    hints = [get_type_hints(each)["type"] for each in get_args(union)]
    literals = [arg for hint in hints for arg in (get_args(hint) or (hint,))]
    texts = {text for each in literals for text in (get_args(each) or (each,))}
    return {text for text in texts if isinstance(text, str)}


def is_known(union: Any, value: dict[str, Any], error_type: str) -> bool:
    try:
        TypeAdapter[Any](union).validate_python(value)
    except ValidationError as error:
        return all(each["type"] != error_type for each in error.errors())
    return True


def test_every_type_of_the_openai_package_is_known() -> None:
    tools = types_of(ToolParam)
    assert {"function", "custom", "namespace", "web_search", "mcp"} <= tools
    assert [kind for kind in tools if not is_known(Tool, {"type": kind}, "tool")] == []
    items = types_of(ResponseInputItemParam)
    assert {"message", "function_call", "web_search_call", "item_reference"} <= items
    assert [kind for kind in items if not is_known(Item, {"type": kind}, "item")] == []
    assert not is_known(Tool, {"type": "x"}, "tool")
    assert not is_known(Item, {"type": "x"}, "item")
