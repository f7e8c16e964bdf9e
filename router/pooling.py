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

    mode: str = "lasttoken"  # sentence-transformers' name; modes that are concatenated: cls+mean
    refusal: str = ""  # why the embeddings are not served; "" if they are

    def choose(self, requested: inference_pb2.Pooling) -> inference_pb2.Pooling:
        """Returns the pooling of a request; POOLING_UNSPECIFIED requests the model's own.

        Raises InvalidArgument as `check`, and if the model's own pooling is not served.
        """
        self.check()
        if requested:
            return requested
        if self.mode not in _SERVED:
            raise InvalidArgument(
                f"this model's own pooling is {self.mode}, which is not served; set pooling_type "
                "to LAST or MEAN",
                "pooling_type",
            )
        return _SERVED[self.mode]

    def check(self) -> None:
        """Raises InvalidArgument if the model's embeddings are not served with any pooling."""
        if self.refusal:
            raise InvalidArgument(
                f"the embeddings of this model are not served: {self.refusal}", "model"
            )
