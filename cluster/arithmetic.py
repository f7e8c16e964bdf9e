"""Computes the arithmetic of the served model for the console, as `tandem explain` shows it.

The sizes of a model come from its tree, which needs torch. So a child process counts them once, and
the router computes the rest without torch.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from ..proto.errors import InvalidArgument, Unavailable
from ..proto.limits import MAX_TOKENS
from ..proto.shared_result import SharedResult
from ..workers.model.config import CheckpointError, ModelConfig
from ..workers.model.costs.inference import InferenceCost, inference_cost
from ..workers.model.costs.report import WorkReport, cost_report
from ..workers.model.costs.stages import list_stages

MAX_OUTPUT_TOKENS: Final = 1_024  # of one report, which has a line for each
_COUNT_SECONDS: Final = 120.0
_COST: Final = TypeAdapter(InferenceCost)


def make_cost(
    config: ModelConfig,
    dtype: str,
    *,
    quantization: str | None = None,
    cache_dtype: str = "auto",
    device_type: str = "cpu",
) -> InferenceCost:
    """Returns the arithmetic of a model. Raises CheckpointError for a wrong combination."""
    from ..workers.model.costs.sizes import model_sizes
    from ..workers.model.registry import with_quantization

    if quantization is not None:
        config = with_quantization(config, quantization)
    try:
        return inference_cost(config, model_sizes(config, dtype, device_type), dtype, cache_dtype)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


class ServedArithmetic:
    """Explains prompts of the served model in numbers. Lives in one event loop."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        quantization: str | None = None,
        cache_dtype: str = "auto",
        device_type: str = "cpu",
    ) -> None:
        """Takes the model's folder, and how it is served: see `make_cost`."""
        self._arguments = (str(folder), dtype, quantization or "", cache_dtype, device_type)
        self._cost: InferenceCost | None = None
        self._counting = SharedResult(self._count)

    async def explain(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Returns the shapes, the report and the work of each step, as JSON.

        The first call takes seconds. Raises InvalidArgument if a number is out of its bounds, and
        Unavailable if the sizes of the model cannot be counted.
        """
        bounds = {"prompt_tokens": MAX_TOKENS, "output_tokens": MAX_OUTPUT_TOKENS}
        for name, given in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if not 1 <= given <= bounds[name]:
                raise InvalidArgument(f"must be from 1 to {bounds[name]}", name)
        if self._cost is None:
            self._cost = await self._counting.get()
        return await asyncio.to_thread(_explain, self._cost, prompt_tokens, output_tokens)

    async def _count(self) -> InferenceCost:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *self._arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_COUNT_SECONDS):
                found, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise Unavailable("the sizes of the model cannot be counted")
        return _COST.validate_python(json.loads(found))


def _explain(cost: InferenceCost, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    report = cost_report("", cost, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    works = [cost.prefill(prompt_tokens), *cost.decodes(prompt_tokens, output_tokens)]
    return {
        "stages": [asdict(stage) for stage in list_stages(cost.config, prompt_tokens)],
        "cost": report.as_json(),
        "steps": [
            asdict(WorkReport.of(work)) | {"kv_bytes": cost.kv_bytes(prompt_tokens + number)}
            for number, work in enumerate(works)
        ],
    }


def _print_cost(arguments: Sequence[str]) -> None:
    """Prints the cost of a model as JSON; the arguments are those of `ServedArithmetic`."""
    from ..workers.model.registry import load_model_config

    folder, dtype, quantization, cache_dtype, device_type = arguments
    cost = make_cost(
        load_model_config(Path(folder)),
        dtype,
        quantization=quantization or None,
        cache_dtype=cache_dtype,
        device_type=device_type,
    )
    # pydantic's own JSON has no infinity, which some models' limits are.
    print(json.dumps(_COST.dump_python(cost)))


if __name__ == "__main__":
    _print_cost(sys.argv[1:])
