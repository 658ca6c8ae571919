"""What a network's traced graph is made of."""

from collections import Counter

import torch
from torch.fx.experimental.proxy_tensor import make_fx

PRODUCTS = {"mm", "addmm", "bmm", "matmul"}
RESHAPING = {"view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "clone"}
ALLOWED = PRODUCTS | RESHAPING | {"add", "_softmax", "softmax"}


def operations(module: torch.nn.Module, *inputs: torch.Tensor) -> Counter[str]:
    """The aten operations of one call, by name."""
    graph = make_fx(module)(*inputs).graph
    return Counter(str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function")


def strangers(module: torch.nn.Module, *inputs: torch.Tensor) -> set[str]:
    """Operations that are no matrix product, addition, softmax or reshaping."""
    return set(operations(module, *inputs)) - ALLOWED
