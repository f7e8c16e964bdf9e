"""Decides how the hidden states of a text are pooled into its embedding."""

from dataclasses import dataclass
from typing import Final

from ..proto import inference_pb2
from ..proto.errors import InvalidArgument

_SERVED: Final = {
    "lasttoken": inference_pb2.POOLING_LAST,
    "mean": inference_pb2.POOLING_MEAN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRules:
    """Holds what a model's own files say about its embeddings."""

    # sentence-transformers' name, of several modes as cls+mean; or "unknown" and the reason.
    mode: str = "lasttoken"
    refusal: str = ""  # why the embeddings are not served; "" if they are

    def choose(self, requested: inference_pb2.Pooling) -> inference_pb2.Pooling:
        """Returns the pooling of a request; POOLING_UNSPECIFIED requests the model's own.

        Raises InvalidArgument as `check`, and if the model's own pooling is unknown or not served.
        """
        self.check()
        if requested:
            return requested
        if self.mode not in _SERVED:
            raise InvalidArgument(
                f"this model's own pooling is {self.mode}; only LAST and MEAN are served: set one "
                "of them",
                "pooling_type",
            )
        return _SERVED[self.mode]

    def check(self) -> None:
        """Raises InvalidArgument if the model's embeddings are not served with any pooling."""
        if self.refusal:
            raise InvalidArgument(
                f"the embeddings of this model are not served: {self.refusal}", "model"
            )
