"""Reading a feed-forward network: a chain of linear maps and activations, whatever module or function they are written as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from partita.errors import NonFiniteValueError, UnsupportedError

__all__ = ["Activation", "Stage", "read_chain"]

_SUPPORTED = (
    "Linear, ReLU, ReLU6, Hardtanh, clamp, LeakyReLU, GELU, Tanh, Sigmoid, SiLU, Identity, Flatten and "
    "Dropout (in eval mode)"
)


@dataclass(frozen=True)
class Activation:
    """`kind` is relu, leaky, clamp, tanh, sigmoid, silu, gelu or gelu_tanh; parameters are (slope,) or (low, high)."""

    kind: str
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Stage:
    """`act(W z + b)`; either may be missing."""

    weight: Tensor | None
    bias: Tensor | None
    activation: Activation | None


def read_chain(mlp: nn.Module) -> list[Stage]:
    """The stages of the network, a Linear joined with the activation behind it.

    Raises:
        UnsupportedError: a layer outside the list (named), a branch or a sum of branches, dropout that is switched on.
    """
    if not isinstance(mlp, nn.Module):
        raise UnsupportedError(f"mlp is a {type(mlp).__name__}; expected an nn.Module.")
    _require_no_hooks(mlp)
    stages: list[Stage] = []
    for part in _parts(mlp):
        joins = stages and stages[-1].activation is None and isinstance(part, Activation)
        if isinstance(part, nn.Linear):
            bias = torch.zeros(part.out_features) if part.bias is None else part.bias
            if not (part.weight.isfinite().all() and bias.isfinite().all()):
                raise NonFiniteValueError(f"{part} has weights that are NaN or infinite; expected finite weights.")
            stages.append(Stage(part.weight.detach(), bias.detach().to(part.weight.dtype), None))
        elif joins:
            stages[-1] = Stage(stages[-1].weight, stages[-1].bias, part)
        else:
            stages.append(Stage(None, None, part))
    if not any(s.weight is not None for s in stages):
        raise UnsupportedError("the network has no Linear layer; expected at least one.")
    return stages


def _require_no_hooks(mlp: nn.Module) -> None:
    """Hooks change what a layer computes without a trace; weight_norm and spectral_norm of old are hooks too."""
    for name, module in mlp.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnsupportedError(
                f"{type(module).__name__} (layer {name!r}) has forward hooks, which may change what it computes. Remove them "
                "(weight_norm: torch.nn.utils.remove_weight_norm)."
            )


def _parts(mlp: nn.Module) -> Iterator[nn.Linear | Activation]:
    """Linear layers and activations in order, from the traced graph; identities are left out."""
    try:
        traced = fx.symbolic_trace(mlp)
    except Exception as error:
        raise UnsupportedError(f"{type(mlp).__name__} cannot be read as a chain of layers: {error}") from None
    previous: fx.Node | None = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if previous is not None:
                raise UnsupportedError(f"{type(mlp).__name__} takes several arguments; expected one.")
        elif node.op != "output" and node.all_input_nodes != [previous]:
            raise UnsupportedError(
                f"{_name(traced, node)} does not follow the layer before it; expected a chain without branches or sums."
            )
        elif node.op == "output" and node.args[0] is not previous:
            raise UnsupportedError(f"{type(mlp).__name__} returns {node.args[0]!r}; expected the last layer's output.")
        if node.op not in ("placeholder", "output"):
            part = _meaning(traced, node)
            if part is not None:
                yield part
        previous = node


def _name(traced: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return f"{type(traced.get_submodule(str(node.target))).__name__} (layer {node.target!r})"
    return f"{getattr(node.target, '__name__', node.target)} ({node.op})"


def _meaning(traced: fx.GraphModule, node: fx.Node) -> nn.Linear | Activation | None:
    """What a node is, None for one that changes nothing."""
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        rule = _MODULES.get(type(module))
        found = None if rule is None else rule(module)
    else:
        call = _CALLS.get(node.target if node.op == "call_function" else str(node.target))
        options = {name: value for name, value in node.kwargs.items() if name != "input"}
        found = None if call is None else call(*node.args[1:], **options)
    if found is None:
        raise UnsupportedError(f"{_name(traced, node)} is not supported; supported are {_SUPPORTED}.")
    return None if isinstance(found, str) else found


def _clamp(min: Any = None, max: Any = None) -> Activation | None:
    low, high = (-math.inf if min is None else min), (math.inf if max is None else max)
    numbers = all(isinstance(x, (int, float)) for x in (low, high)) and low < high
    return Activation("clamp", (float(low), float(high))) if numbers else None


def _gelu(approximate: str = "none") -> Activation:
    return Activation("gelu" if approximate == "none" else "gelu_tanh")


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> str | None:
    if training and p > 0:
        raise UnsupportedError("Dropout is active, so the network is random. Call .eval() first.")
    return "same"


def _flatten(start_dim: int = 0, end_dim: int = -1) -> str | None:
    return "same" if (start_dim, end_dim) == (1, -1) else None


_MODULES: dict[type, Callable[[Any], nn.Linear | Activation | str | None]] = {
    nn.Linear: lambda m: m,
    nn.Identity: lambda m: "same",
    nn.Flatten: lambda m: _flatten(m.start_dim, m.end_dim),
    nn.Dropout: lambda m: _dropout(m.p, m.training),
    nn.ReLU: lambda m: Activation("relu"),
    nn.ReLU6: lambda m: Activation("clamp", (0.0, 6.0)),
    nn.Hardtanh: lambda m: _clamp(m.min_val, m.max_val),
    nn.LeakyReLU: lambda m: Activation("leaky", (float(m.negative_slope),)),
    nn.GELU: lambda m: _gelu(m.approximate),
    nn.Tanh: lambda m: Activation("tanh"),
    nn.Sigmoid: lambda m: Activation("sigmoid"),
    nn.SiLU: lambda m: Activation("silu"),
}

_CALLS: dict[Any, Callable[..., Activation | str | None]] = {
    functional.gelu: _gelu,
    functional.leaky_relu: lambda negative_slope=0.01, inplace=False: Activation("leaky", (float(negative_slope),)),
    functional.hardtanh: lambda min_val=-1.0, max_val=1.0, inplace=False: _clamp(min_val, max_val),
    functional.relu6: lambda inplace=False: Activation("clamp", (0.0, 6.0)),
    functional.silu: lambda inplace=False: Activation("silu"),
    functional.relu: lambda inplace=False: Activation("relu"),
    functional.dropout: _dropout,
    torch.clamp: _clamp,
    "clamp": _clamp,
    torch.flatten: _flatten,
    "flatten": _flatten,
    **{f: (lambda: Activation("relu")) for f in (torch.relu, "relu")},
    **{f: (lambda: Activation("tanh")) for f in (torch.tanh, functional.tanh, "tanh")},
    **{f: (lambda: Activation("sigmoid")) for f in (torch.sigmoid, functional.sigmoid, "sigmoid")},
}
