"""Renders chat templates by transformers, in a process of its own that template.py starts.

Knows nothing of tokens.
"""

import json
import resource
from collections.abc import Mapping
from typing import Any, Final

import psutil
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from .child_process import answer_requests

_MEMORY_BYTES: Final = 2**28  # of all renderings, beside what transformers takes
_MAX_REASON: Final = 200


def main() -> None:
    """Renders within bounded memory."""
    most = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answer_requests(lambda request: json.dumps(_render(*json.loads(request))).encode())


def _render(variables: Mapping[str, Any], max_characters: int) -> dict[str, str]:
    """Returns the text, or the reason why there is none and the field at fault. A template can raise anything."""
    try:
        texts: Any = render_jinja_template(**variables)[0]
        if len(texts[0]) <= max_characters:
            return {"text": texts[0]}
    except MemoryError:
        pass
    except Exception as error:
        if str(error).startswith("continue_final_message"):  # by transformers
            return {"reason": "does not repeat the last message", "field": "prompt.chat.continue_final_message"}
        said = f": {str(error)[:_MAX_REASON]}" if type(error) is TemplateError else ""  # by raise_exception
        return {"reason": f"refuses these messages{said}"}
    return {"reason": f"renders more than {max_characters} characters for these messages"}


if __name__ == "__main__":
    main()
