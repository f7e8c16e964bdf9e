"""Controls requests: API servers, preparation, scheduling, dispatch, output, clients."""
