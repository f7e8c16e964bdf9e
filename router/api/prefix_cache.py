"""Answers POST /reset_prefix_cache, as vLLM does."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .service import GenerationService


async def reset_prefix_cache(service: GenerationService, request: Request) -> Response:
    """Empties the prefix caches of all workers, in all tiers, whatever the parameters are.

    Raises PermissionDenied.
    """
    failed = await service.reset_prefix_cache(request.state.caller)
    return JSONResponse({"success": not failed, "failed": dict(failed)})
