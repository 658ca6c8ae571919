"""Which modules of a network drop out numbers at random: a network in train mode is not a function."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["active_dropout"]

_SHARES = ("dropout", "attention_dropout", "dropout_p")  # numbers that layers pass on to functions that drop out


def active_dropout(model: object) -> str:
    """The modules of a network whose dropout is switched on, in words. Empty if there are none.

    Args:
        model: anything; only an `nn.Module` has modules.

    >>> active_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.2)))
    "'1' (Dropout, p = 0.1) and 1 more"
    >>> active_dropout(nn.Sequential(nn.Dropout(0.1)).eval())
    ''
    """
    if not isinstance(model, nn.Module):
        return ""
    shares = [(name, m, _share(m)) for name, m in model.named_modules() if m.training]
    found = [f"{name or 'the model'!r} ({type(m).__name__}, p = {p:g})" for name, m, p in shares if p > 0]
    return found[0] + (f" and {len(found) - 1} more" if len(found) > 1 else "") if found else ""


def _share(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return float(module.p)
    shares = [getattr(module, name, 0.0) for name in _SHARES]
    return max((s for s in shares if isinstance(s, float)), default=0.0)
