"""Figures of every head during training, on fixed probe inputs. The training stays the same bit for bit."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.notebook_cards import counted
from partita.errors import NonFiniteValueError, UnsupportedError
from partita.inspection.captured_heads import capture
from partita.inspection.figures import Figures, Roles
from partita.inspection.hardening import one_number
from partita.inspection.interception import Reader
from partita.inspection.report import finite_or_none, read
from partita.storage.files import write_json

__all__ = ["TrainingWatch"]

FORMAT, VERSION = "partita-training", 1
_NAMES = [f.name for kind in (Figures, Roles) for f in fields(kind)]


@dataclass(frozen=True, eq=False)
class _Moment:
    """The figures at one step; `numbers` is (heads, 2 × figures), those of the head and of the null."""

    step: int
    loss: float
    heads: tuple[tuple[str, int], ...]
    numbers: np.ndarray


class TrainingWatch:
    """Records the figures of every head while a model is trained: `watch(step, loss=loss)` in the loop.

    Every `every` steps it runs the model on the probe, in evaluation mode and without gradients, and reads the heads. The training
    does not change: weights after it are bit for bit those of training without a watch. It restores the train and eval flags of
    every module, buffers, and the states of the random generators (torch on every device, numpy, Python); gradients and the cache
    of autocast are not touched. But your own hooks also run on the probe, and attributes that a forward pass sets are left as the
    probe set them. Memory is bounded: at `limit` recorded steps every second one is dropped, and from then on only half as many
    steps are recorded.

    Args:
        model: the module.
        probe: inputs of the model: a tensor, a tuple of arguments, a dict of keyword arguments, or a function that is called as
            `probe(model)`.
        every: steps that are multiples of this are recorded.
        layers: as in `capture`.
        heads: as in `capture`.
        tokens: as in `capture`.
        batch: as in `capture`.
        readers: as in `capture`.
        budget: as in `read`; with 0, heads are read while the probe runs, no vectors are kept, and dead keys are not looked for.
        limit: the largest number of recorded steps, at least 2.

    Raises:
        UnsupportedError: an argument is invalid; later, a step that does not increase, or a probe without attention.

    >>> import torch, partita as pa
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> watch = pa.inspect.TrainingWatch(model, torch.randn(2, 5, 8), every=5)
    >>> for step in range(11):
    ...     loss = model(torch.randn(4, 5, 8)).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     _ = watch(step, loss=loss)
    >>> [(row["step"], row["head"]) for row in watch.rows()]
    [(0, 0), (0, 1), (5, 0), (5, 1), (10, 0), (10, 1)]
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[nn.Module], Any],
        *,
        every: int = 50,
        layers: str | Sequence[str] | None = None,
        heads: Sequence[int] | None = None,
        tokens: int | None = None,
        batch: int | None = None,
        readers: Mapping[str, Reader] | None = None,
        budget: int = 0,
        limit: int = 500,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedError(f"model is of type {type(model).__name__}; expected an nn.Module.")
        for name, number, least in (("every", every, 1), ("limit", limit, 2), ("budget", budget, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise UnsupportedError(f"{name} is {number!r}; expected a whole number ≥ {least}.")
        if not (isinstance(probe, Tensor | tuple | list | Mapping) or callable(probe)):
            raise UnsupportedError(
                f"probe is of type {type(probe).__name__}; expected a tensor, a tuple of arguments, a dict of keyword arguments, "
                "or a function of the model."
            )
        self.model, self.every, self.limit, self.budget = model, every, limit, budget
        self._probe = probe
        self._capture: dict[str, Any] = {"layers": layers, "heads": heads, "tokens": tokens, "batch": batch}
        self._capture["readers"] = readers
        self._moments: list[_Moment] = []
        self._last: int | None = None
        self._due, self._stride = 0, 1  # steps that were due; one in `_stride` of them is recorded

    def __call__(self, step: int, loss: Any = None) -> bool:
        """Record the figures if a recording is due. Returns whether it recorded.

        Args:
            step: number of the step; larger at every call.
            loss: a number or a tensor with one element, recorded beside the figures.
        """
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise UnsupportedError(f"step is {step!r}; expected a whole number.")
        if self._last is not None and step <= self._last:
            raise UnsupportedError(
                f"step is {step} after {self._last}; expected larger numbers at every call. Use a new watch for a new run."
            )
        self._last = int(step)
        if step % self.every:
            return False
        self._due += 1
        if (self._due - 1) % self._stride:
            return False
        heads, numbers = self._measured()
        found = math.nan if loss is None else one_number(loss, "loss is")
        self._moments.append(_Moment(int(step), found, heads, numbers))
        if len(self._moments) >= self.limit:
            self._stride *= 2
            self._moments = self._moments[::2]
        return True

    def _measured(self) -> tuple[tuple[tuple[str, int], ...], np.ndarray]:
        with _left_alone(self.model), capture(self.model, stream=self.budget == 0, **self._capture) as recorded:
            try:
                self._run()
            except NonFiniteValueError:  # the model has diverged: its heads have no figures
                if not self._moments:
                    raise
                known = self._moments[-1]
                return known.heads, np.full_like(known.numbers, np.nan)
        report = read(recorded, budget=self.budget)
        parts = [(h.figures, h.roles, h.null, h.null_roles) for h in report.heads]
        numbers = [[number for part in four for number in asdict(part).values()] for four in parts]
        return tuple((h.layer, h.head) for h in report.heads), np.array(numbers, dtype=np.float64)

    def _run(self) -> None:
        if isinstance(self._probe, Tensor):
            self.model(self._probe)
        elif isinstance(self._probe, Mapping):
            self.model(**self._probe)
        elif isinstance(self._probe, tuple | list):
            self.model(*self._probe)
        else:
            self._probe(self.model)

    @property
    def steps(self) -> tuple[int, ...]:
        """The recorded steps."""
        return tuple(m.step for m in self._moments)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss at each recorded step; NaN where none was given."""
        return tuple(m.loss for m in self._moments)

    @property
    def heads(self) -> tuple[tuple[str, int], ...]:
        """`(layer, head)` of every head that was recorded."""
        return tuple(dict.fromkeys(head for m in self._moments for head in m.heads))

    def series(self, layer: str, head: int, figure: str, *, null: bool = False) -> np.ndarray:
        """One figure of one head at the recorded steps, `(steps,)`; NaN where it is undefined.

        Args:
            layer: the module path of the layer.
            head: its number within the layer.
            figure: a field of `Figures` or of `Roles`.
            null: return the figure of the random head instead.
        """
        if figure not in _NAMES:
            raise UnsupportedError(f"figure is {figure!r}; expected one of {', '.join(_NAMES)}.")
        if (layer, head) not in self.heads:
            raise UnsupportedError(f"no head {(layer, head)} was recorded; recorded: {list(self.heads)[:6]}.")
        place = _NAMES.index(figure) + len(_NAMES) * null
        return np.array(
            [
                m.numbers[m.heads.index((layer, head)), place] if (layer, head) in m.heads else np.nan
                for m in self._moments
            ]
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row per step and head, for `pandas.DataFrame`: step, loss, layer, head, figures, those of the null as `null_…`."""
        names = [*_NAMES, *(f"null_{name}" for name in _NAMES)]
        return [
            {"step": m.step, "loss": m.loss, "layer": layer, "head": head, **dict(zip(names, row))}
            for m in self._moments
            for (layer, head), row in zip(m.heads, m.numbers.tolist())
        ]

    def to_json(self) -> dict[str, Any]:
        """The rows as a dict of plain data. Undefined figures are None."""
        return {"format": FORMAT, "version": VERSION, "every": self.every, "rows": finite_or_none(self.rows())}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_json()` to a file.

        Args:
            path: the file. Parents are created.
        """
        return write_json(path, self.to_json(), indent=None)

    def __repr__(self) -> str:
        heads, steps = counted(len(self.heads), "head"), counted(len(self._moments), "step")
        return f"TrainingWatch({heads}, {steps} recorded, every {self.every})"


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. On exit, everything that a forward pass may have changed is restored."""
    flags = [(m, m.training) for m in model.modules()]
    buffers = [_Buffer.of(m, name) for m in model.modules() for name in m._buffers]
    with ExitStack() as stack:
        for buffer in buffers:
            stack.callback(buffer.put_back)
        for module, flag in flags:
            stack.callback(setattr, module, "training", flag)
        for put_back in _generators():
            stack.callback(put_back)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        # copies of weights cached here have no gradient, and training would use them
        torch.set_autocast_cache_enabled(False)
        for module, _ in flags:
            module.training = False  # not eval(): modules may override it to do more
        stack.enter_context(torch.no_grad())
        yield


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer of a module, and a copy of its numbers."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    version: int
    numbers: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> _Buffer:
        tensor = module._buffers[name]
        if tensor is None:
            return cls(module, name, None, 0, None)
        return cls(module, name, tensor, tensor._version, tensor.detach().clone())

    def put_back(self) -> None:
        self.module._buffers[self.name] = self.tensor
        if self.tensor is not None and self.numbers is not None and self.tensor._version != self.version:
            with torch.no_grad():  # only if it was written into: a write may break a graph that waits for backward
                self.tensor.copy_(self.numbers)


def _generators() -> list[Callable[[], Any]]:
    """Functions that restore each random generator to its present state."""
    kinds: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        kinds.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    if torch.backends.mps.is_available():
        kinds.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    return [partial(put_back, state()) for state, put_back in kinds]
