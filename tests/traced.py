"""What a network's traced graph is made of."""

from collections import Counter

import torch
from torch.fx.experimental.proxy_tensor import make_fx

PRODUCTS = {"mm", "addmm", "bmm", "matmul"}
RESHAPING = {
    "flatten",
    "unflatten",
    "view",
    "_unsafe_view",
    "reshape",
    "transpose",
    "permute",
    "t",
    "unsqueeze",
    "squeeze",
    "expand",
    "clone",
}
ALLOWED = PRODUCTS | RESHAPING | {"add", "_softmax", "softmax"}


def operations(module: torch.nn.Module, *inputs: torch.Tensor) -> Counter[str]:
    """The aten operations of one call, by name."""
    graph = make_fx(module)(*inputs).graph
    return Counter(str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function")


def symbolic_operations(module: torch.nn.Module) -> Counter[str]:
    """The same read by torch.fx.symbolic_trace, which runs the code with placeholders."""
    graph = torch.fx.symbolic_trace(module).graph
    names = (
        n.target if isinstance(n.target, str) else n.target.__name__ for n in graph.nodes if n.op.startswith("call_f")
    )
    methods = (n.target for n in graph.nodes if n.op == "call_method")
    return Counter([*names, *methods])


def strangers(module: torch.nn.Module, *inputs: torch.Tensor) -> set[str]:
    """Operations that are no matrix product, addition, softmax or reshaping."""
    return set(operations(module, *inputs)) - ALLOWED
