"""Maps names of vLLM's parsers to the formats of router/frontend/formats that they read.

docs/clients/structured.md lists them.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BeforeValidator

from ..router.frontend.formats.calls import ToolCallParserName
from ..router.frontend.formats.reasoning import ReasoningParserName

TOOL_CALL_ALIASES: Final[Mapping[str, str]] = {
    "glm47": "glm45",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "granite4": "hermes",
    "ernie45": "hermes",
    "llama4_pythonic": "pythonic",
    "llama4_json": "llama3_json",
}
# All of them read <think>, which the template or the model writes first.
REASONING_ALIASES: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "deepseek_v3",
        "glm45",
        "glm47",
        "kimi_k2",
        "mimo",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "poolside_v1",
        "step3p5",
    ),
    "qwen3",
)


def _renaming(aliases: Mapping[str, str]) -> BeforeValidator:
    def rename(name: object) -> object:
        return aliases.get(name, name) if isinstance(name, str) else name

    return BeforeValidator(rename)


ToolCallParser = Annotated[ToolCallParserName, _renaming(TOOL_CALL_ALIASES)]
ReasoningParser = Annotated[ReasoningParserName, _renaming(REASONING_ALIASES)]
