"""What chosen experts gave for each token, before it is added up."""

from typing import Any, NamedTuple

import torch


class Picked(NamedTuple):
    """What each chosen expert gave: rows [tokens * used, cols], of ids and weights [tokens, used]; addresses of experts
    that are not on this side are 0, and their rows mean nothing."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    addresses: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """What a kernel that adds them up takes, beside `rows`."""
        return {
            "ids": self.ids, "ids_stride": self.ids.stride(0), "weights": self.weights,
            "weights_stride": self.weights.stride(0), "addresses": self.addresses, "USED": self.ids.shape[1],
        }  # fmt: skip
