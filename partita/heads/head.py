"""What every compiled model is; and the folded head, `net(z) = Σ_j w_j(z) V_j`, `w = softmax_j(−R|z − v_j|²/2)`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypedDict

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.arguments import real_array
from partita.arithmetic.precision import DOUBLE, PRECISIONS, Precision
from partita.errors import DomainError, FormatError, ShapeError, SizeError, UnsupportedError
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import Partition
from partita.heads.scores import AffineScores
from partita.heads.table_blocks import all_finite, blocks_of
from partita.kernels.guards import certified
from partita.kernels.point_sums import PointParts

__all__ = [
    "DivisibleHead",
    "DotProductAttention",
    "FoldedHead",
    "Head",
    "HeadShapes",
    "as_buffers",
    "as_parameters",
    "axis_sizes",
    "computing_dtype",
    "count_text",
    "flatten_inputs",
    "numbers",
    "recorded_form",
    "recorded_shapes",
    "require_folded",
    "require_full",
    "require_stored",
    "short_text",
]

_KEYS_LISTED_AT_MOST = 1 << 27
_MARGIN = 1 / 8  # of the largest number of the dtype: sums are rounded on the way, and bounded here in float64


def count_text(count: int) -> str:
    """1,234,567, or 10^21.6 for numbers too long to read."""
    return f"{count:,}" if count < 10**12 else f"10^{math.log10(count):.1f}"


def real_tensor(name: str, given: Any, *, shared: bool = False) -> Tensor:
    """A tensor of floats as it is, anything else as float64; a ShapeError if it holds no real numbers.

    Arrays are copied, unless the tensor may share their memory.
    """
    if shared and type(given) is np.ndarray and given.dtype == np.float64 and given.flags.carray:
        return torch.from_numpy(given)
    found = given if isinstance(given, Tensor) else torch.from_numpy(real_array(name, given))  # which is a copy
    if found.is_complex():
        raise ShapeError(f"{name}: found {found.dtype}; expected real numbers")
    return found if found.is_floating_point() else found.double()


def flatten_inputs(
    inputs: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, *, shared: bool = False
) -> tuple[Tensor, tuple[int, ...]]:
    """Arguments of shapes `(…, *shape)`, tensors or arrays, as one `(n, m)` tensor, and the leading shape they share.

    With `shared` the result may share the memory of an array, for callers that neither change nor keep it.
    """
    if len(inputs) != len(shapes):
        raise ShapeError(f"found {len(inputs)} argument(s); this head takes {len(shapes)}.")
    flat, lead = [], None
    for given, shape in zip(inputs, shapes):
        z = real_tensor("an input", given, shared=shared)
        cut = z.dim() - len(shape)
        if cut < 0 or tuple(z.shape[cut:]) != shape:
            batch = " For a batch of points of one variable pass z[:, None]." if shape == (1,) and z.dim() == 1 else ""
            wanted = ", ".join(map(str, shape))
            raise ShapeError(f"an input has shape {tuple(z.shape)}; expected (…, {wanted}).{batch}")
        if lead is not None and z.shape[:cut] != lead:
            raise ShapeError(
                f"the arguments have batch shapes {tuple(lead)} and {tuple(z.shape[:cut])}; expected the same."
            )
        lead = z.shape[:cut]
        # −1 keeps the batch symbolic under torch.export; an empty batch has to be spelled out
        rows = -1 if torch.compiler.is_compiling() or z.numel() else math.prod(lead)
        flat.append(z.reshape(rows, math.prod(shape)).to(dtype))
    return torch.cat(flat, dim=1) if len(flat) > 1 else flat[0], tuple(lead or ())


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a head with values of this dtype computes in, and holds its centers and temperatures in.

    >>> computing_dtype(torch.bfloat16), computing_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _is_value(name: str) -> bool:
    """Whether a tensor of this name holds values: they alone may be of a half type."""
    return name in ("values", "value_slopes") or name.startswith("core_")


def numbers(tensor: Tensor) -> Array:
    """The tensor as float64 numpy numbers."""
    return np.asarray(tensor.detach().double().cpu().numpy())


def axis_sizes(axes: Sequence[Tensor], rates: Tensor, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
    """What the softmax of each axis forms, with the largest size that each may reach for z in [lo, hi]."""
    total = 0.0
    for i, (axis, rate, a, b) in enumerate(zip(map(numbers, axes), numbers(rates), lo, hi)):
        far = float(max(b - axis[0], axis[-1] - a, 0.0))
        yield f"z − c on axis {i}", far
        yield f"R(z − c)/2 on axis {i}", float(rate) / 2 * far
        total += float(rate) / 2 * far * far
    yield "the score Σ_i R_i(z_i − c_i)²/2", total


class HeadShapes(TypedDict):
    """The two arguments that every head takes."""

    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]


def recorded_form(record: Mapping[str, Any], box: Box) -> tuple[HeadShapes, str]:
    """The shapes in a record, and the name of its dtype.

    Raises:
        FormatError: shapes that are not whole numbers ≥ 1 or do not fit the box, or an unknown dtype.
    """
    try:
        inputs, output = tuple(tuple(s) for s in record["input_shapes"]), tuple(record["output_shape"])
        dtype = record["dtype"]
    except (KeyError, TypeError) as error:
        raise FormatError(
            f"head record {short_text(dict(record))}: expected input_shapes, output_shape and dtype "
            f"({type(error).__name__}: {error})."
        ) from None
    if not inputs or not all(type(n) is int and n >= 1 for shape in (*inputs, output) for n in shape):
        raise FormatError(f"head record: shapes are {inputs} and {output}; expected integers ≥ 1.")
    if sum(math.prod(s) for s in inputs) != box.dimension:
        raise FormatError(
            f"head record: inputs have shapes {inputs}; expected {box.dimension} numbers in all, as in the domain."
        )
    if not isinstance(dtype, str) or dtype not in PRECISIONS or dtype.startswith("torch"):
        raise FormatError(f"head record: dtype is {dtype!r}; expected float64, float32, bfloat16 or float16.")
    return {"input_shapes": inputs, "output_shape": output}, dtype


def require_stored(tensors: Mapping[str, Tensor], dtype: str) -> None:
    """A FormatError for a tensor that is not of the recorded dtype, or not finite."""
    for name, tensor in tensors.items():
        expected = f"torch.{'float32' if PRECISIONS[dtype].is_half and not _is_value(name) else dtype}"
        if str(tensor.dtype) != expected:
            raise FormatError(
                f"head record: dtype is {dtype!r}, tensor {name} is {tensor.dtype}; expected {expected}: values have the head's "
                "dtype, and so have the other tensors, unless it is a half type, when they are float32."
            )
        if not all_finite(tensor):
            raise FormatError(f"head tensor {name} contains NaN or infinity; expected finite numbers.")


def recorded_shapes(
    record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box, *, needed: set[str], optional: set[str]
) -> HeadShapes:
    """The shapes in the record of a folded head, after the checks that every kind of it shares.

    Raises:
        FormatError: what `recorded_form` and `require_stored` refuse; tensors that are missing or unknown.
    """
    shapes, dtype = recorded_form(record, box)
    if not needed <= set(tensors) <= needed | optional:
        raise FormatError(
            f"head tensors are {sorted(tensors)}; expected {sorted(needed)}, optionally {sorted(optional)}."
        )
    require_stored(tensors, dtype)
    rates, shape = tuple(tensors["inverse_temperature"].shape), () if "centers" in needed else (box.dimension,)
    if rates != shape:
        raise FormatError(f"head tensor inverse_temperature has shape {rates}; expected {shape}.")
    return shapes


def short_text(found: object) -> str:
    """What was found in a record, cut to fit into a message."""
    try:
        text = repr(found)
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}…"


def as_parameters(module: nn.Module, names: Iterable[str]) -> None:
    """Turn these buffers of a module into trainable parameters, copies with the same names.

    Args:
        module: the module.
        names: those that are no buffers are left as they are.
    """
    for name in names:
        held = module._buffers.pop(name, None)
        if held is not None:
            module.register_parameter(name, nn.Parameter(held.detach().clone()))


def as_buffers(module: nn.Module, names: Iterable[str]) -> None:
    """Turn these parameters of a module into buffers again.

    Args:
        module: the module.
        names: those that are no parameters are left as they are.
    """
    for name in names:
        held = module._parameters.pop(name, None)
        if held is not None:
            module.register_buffer(name, held.detach().clone())


class Head(nn.Module, ABC):
    """A compiled model: one folded head, or a network of them. Points go in flat, `(n, m)`, and values come out, `(n, out)`.

    Constants are buffers (`state_dict` is plain tensors); `unfreeze()` turns the trainable ones into parameters.

    Attributes:
        input_shapes: one shape per argument: `((m,),)`, `((tokens, dim),)`, or two for cross-attention.
        output_shape: `()`, `(out,)` or `(tokens, dim)`.
    """

    kind: ClassVar[str]  # what the record calls this class

    def __init__(self, *, input_shapes: tuple[tuple[int, ...], ...], output_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.input_shapes = tuple(tuple(s) for s in input_shapes)
        self.output_shape = tuple(output_shape)

    @property
    @abstractmethod
    def num_keys(self) -> int:
        """Cells, ghosts included; of a network those of every use of a head."""

    @abstractmethod
    def evaluate(self, flat: Tensor) -> Tensor:
        """`(n, m)` to `(n, out)`, looking only at the cells that matter."""

    @abstractmethod
    def evaluate_dense(self, flat: Tensor) -> Tensor:
        """The same by softmaxes over all cells: the reference."""

    def point_parts(self) -> PointParts | None:
        """What the sum for one point needs, from the tensors as they are, on the CPU; None if it has to go through `evaluate`."""
        return None

    @abstractmethod
    def partition(self, box: Box) -> Partition | None:
        """The cells over `box`, the domain, from the stored centers; None for a network, whose heads have one each."""

    def record(self) -> dict[str, Any]:
        """Everything about the head that `state_dict` does not hold, as plain data for JSON; `from_record` reads it."""
        return {
            "type": self.kind,
            "input_shapes": [list(s) for s in self.input_shapes],
            "output_shape": list(self.output_shape),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    @abstractmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Self:
        """The head that `record()` and `state_dict()` describe. Nothing in them is trusted.

        Args:
            record: what `record()` returned.
            tensors: what `state_dict()` returned.
            box: the domain, or its bounding box: `partita.geometry.product` of the inputs' boxes if there are two.

        Raises:
            FormatError: an entry or a tensor that is missing, unknown or out of range.
            ShapeError, DomainError: tensors that do not fit together.
        """

    @abstractmethod
    def check_range(self, lo: ArrayLike, hi: ArrayLike) -> None:
        """Check that no number formed while the head runs overflows, or underflows harmfully, for any z in a box.

        Args:
            lo, hi: the corners of the box, `(m,)` or in the inputs' own shape.

        Raises:
            DomainError: an inverse temperature whose half is not a normal number, or a difference, score, value or sum that
                may leave the range of the head's dtype.
            ShapeError: corners of another length.
        """

    @abstractmethod
    def largest_value(self, lo: ArrayLike, hi: ArrayLike) -> float:
        """The largest `|V_j|`, or `|V_j| + |J_j||z − c_j|` for values that depend on z in [lo, hi]; up to rounding.

        For a tensor train it is an upper bound, since it has too many values to look at each.
        """

    def _corners(self, lo: ArrayLike, hi: ArrayLike) -> tuple[Array, Array]:
        """The corners of a box, flat; a ShapeError if they have another length."""
        low, high = (np.asarray(end, dtype=np.float64).ravel() for end in (lo, hi))
        if low.shape != (self.dimension,) or high.shape != (self.dimension,):
            raise ShapeError(f"the corners have {low.size} and {high.size} numbers; expected {self.dimension} each.")
        return low, high

    @property
    def dimension(self) -> int:
        return sum(math.prod(shape) for shape in self.input_shapes)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """That of the values, to which inputs are rounded."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    @abstractmethod
    def semantics(self) -> str:
        """The arithmetic that it runs in, as certificates name it."""

    @property
    def has_query_values(self) -> bool:
        """Whether this is a head on pairs whose values depend on z_Q: the values of cross-attention do not."""
        return False

    @property
    def num_outputs(self) -> int:
        return math.prod(self.output_shape)

    @property
    def num_parameters(self) -> int:
        """Stored scalars: the numbers in `state_dict`."""
        return sum(t.numel() for t in self.state_dict().values())

    def forward(self, *inputs: Any) -> Tensor:
        """`(…, *input_shape)` per argument to `(…, *output_shape)`."""
        flat, lead = self.flatten(*inputs)
        return self.evaluate(flat).reshape((*lead, *self.output_shape))

    def flatten(self, *inputs: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The arguments as one `(n, m)` tensor in the head's dtype, and the leading shape they had."""
        return flatten_inputs(inputs, self.input_shapes, self.dtype)

    def extra_repr(self) -> str:
        shapes = ", ".join(map(str, self.input_shapes))
        return f"{count_text(self.num_keys)} keys, {shapes} → {self.output_shape}, {self.dtype}"

    @abstractmethod
    def unfreeze(self) -> Self:
        """Make the values trainable parameters (same names in `state_dict`)."""

    @abstractmethod
    def freeze(self) -> Self:
        """Make them constants again."""


class FoldedHead(Head):
    """One softmax over the cells of a partition, values attached: B.15 without the detour.

    Differentiable in z and in the values, which `unfreeze()` turns into parameters. Subclasses say where the centers are and how
    to sum without touching every cell.

    `dtype` is that of the values. A head whose values are of a half type (bfloat16 or float16) rounds its inputs to that type;
    its centers and temperatures are float32, it computes in float32, and it returns float32.

    Attributes:
        input_shapes, output_shape: see `Head`.
    """

    inverse_temperature: Tensor
    value_names: tuple[str, ...] = ("values",)  # buffers that `unfreeze` turns into parameters

    @certified
    def evaluate(self, flat: Tensor) -> Tensor:
        """`(n, m)` to `(n, out)`, looking only at the cells that matter."""
        return self._widened()._evaluate(self._rounded(flat))

    @certified
    def evaluate_dense(self, flat: Tensor) -> Tensor:
        """The same by one softmax over all cells: the reference."""
        return self._widened()._evaluate_dense(self._rounded(flat))

    def _rounded(self, flat: Tensor) -> Tensor:
        """Inputs as a head of a half type sees them; otherwise the inputs themselves."""
        computing = self.inverse_temperature.dtype
        return flat if self.dtype == computing else flat.to(self.dtype).to(computing)

    def _widened(self) -> Self:
        """The same head with its values in the dtype that it computes in: itself, unless they are of a half type."""
        computing = self.inverse_temperature.dtype
        if self.dtype == computing:
            return self
        held = {**self._parameters, **self._buffers}
        return self.with_tensors({n: t.to(computing) if t is not None and _is_value(n) else t for n, t in held.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Self:
        """The same head reading other tensors, for as long as a call takes: what it remembers about them is shared.

        Args:
            tensors: all of them by name, None for those that it does not have.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__dict__.update(_parameters={}, _buffers=dict(tensors))
        return other

    @abstractmethod
    def _evaluate(self, flat: Tensor) -> Tensor: ...

    @abstractmethod
    def _evaluate_dense(self, flat: Tensor) -> Tensor: ...

    @abstractmethod
    def affine_scores(self, *, shift: bool = False) -> AffineScores:
        """Scores as affine functions of z, in float64; with `shift`, of `z − middle()`, which takes smaller numbers."""

    @abstractmethod
    def middle(self) -> Array:
        """The middle of the centers, `(m,)`."""

    @abstractmethod
    def partition(self, box: Box) -> Partition:
        """The cells over `box`, the domain, from the stored centers: a `ProductGrid` or a `PowerDiagram`."""

    def check_range(self, lo: ArrayLike, hi: ArrayLike) -> None:
        low, high = self._corners(lo, hi)
        precision = PRECISIONS[str(self.dtype)]
        wider = "float32" if precision.is_half else "float64"
        advice = "rescale the variables" + (f", or use {wider}" if precision.rounds_inputs else "")
        rate = float(self.inverse_temperature.min())
        if not rate >= 2 * precision.smallest:
            raise DomainError(
                f"{type(self).__name__}: half the inverse temperature {rate:.3g} is not a normal {precision.name} number, "
                f"the least of which is {precision.smallest:.3g}; {advice}."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = [("an input", float(np.maximum(np.abs(low), np.abs(high)).max())), *self._sizes(low, high)]
            lost = self._lost_to_underflow(low, high, precision)
        stored = ("an input", "a value", "a slope")  # the other numbers of a head of a half type are float32
        for what, size in sizes:
            largest = precision.value_largest if what in stored else precision.largest
            if not size <= _MARGIN * largest:
                raise DomainError(
                    f"{type(self).__name__}: {what} may reach {size:.3g} and overflows {precision.name}, whose limit is "
                    f"{largest:.3g}; {advice}."
                )
        if not lost <= precision.unit:
            raise DomainError(
                f"{type(self).__name__}: underflow in {precision.name} may change scores or values by {lost:.3g} of their size, "
                f"more than rounding does; {advice}."
            )

    @abstractmethod
    def _sizes(self, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
        """Names of the numbers that are formed for z in [lo, hi], and how large each may get."""

    def _lost_to_underflow(self, lo: Array, hi: Array, precision: Precision) -> float:
        """What underflow on the way may change: of a score absolutely, of the outputs relative to the largest."""
        return 0.0

    def sharpest_rate(self) -> float:
        """The largest inverse temperature over the axes: the R that the literal layers show in W_Q."""
        return float(self.inverse_temperature.max())

    @property
    def dtype(self) -> torch.dtype:
        held: Tensor = getattr(self, self.value_names[0])
        return held.dtype

    @property
    def device(self) -> torch.device:
        return self.inverse_temperature.device

    @property
    def semantics(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        other = self.inverse_temperature.dtype
        return name if other == computing_dtype(self.dtype) else f"{name} values with {other} centers"

    @property
    def has_query_values(self) -> bool:
        slopes, first = self.state_dict().get("value_slopes"), math.prod(self.input_shapes[0])
        if len(self.input_shapes) != 2 or slopes is None:
            return False
        return any(bool(block[:, :, first:].any()) for (block,) in blocks_of(slopes))

    def unfreeze(self) -> Self:
        as_parameters(self, self.value_names)
        return self

    def freeze(self) -> Self:
        as_buffers(self, self.value_names)
        return self

    def as_attention(self) -> DotProductAttention:
        """Plain q, k, v and scaled dot-product attention: the same head for tools that expect one."""
        if self.num_keys * (self.dimension + 1 + self.num_outputs) > _KEYS_LISTED_AT_MOST:
            raise SizeError(
                f"as_attention() would list {count_text(self.num_keys)} keys; call the head instead, which does not list them."
            )
        require_full(self, "as_attention()")
        return DotProductAttention(self)


class DivisibleHead(FoldedHead):
    """A folded head whose keys can be divided: `partial_sums` of disjoint slices merge into the head's output.

    A slice is a range of keys along one axis of `key_counts`. Its tensors have the names of the head's.
    """

    @property
    @abstractmethod
    def key_counts(self) -> tuple[int, ...]:
        """The keys along each axis on which they can be divided."""

    @abstractmethod
    def divided(self, axis: int) -> frozenset[str]:
        """The names of the tensors that slices along an axis hold in parts; they hold the others whole."""

    @abstractmethod
    def tensors_between(self, axis: int, start: int, stop: int) -> dict[str, Tensor | None]:
        """Copies of what a slice holds. Nothing else is read, so that the head itself may lie in a mapped file."""

    @abstractmethod
    def of_slice(self, axis: int, tensors: Mapping[str, Tensor | None]) -> Self:
        """The head of a slice that is not empty, from `tensors_between`. Its windows are at least as wide as the head's."""

    @certified
    def partial_sums(self, flat: Tensor) -> Tensor:
        """`(n, m)` to `(n, 3 + out)`: maximum, log-sum-exp, bound and outputs over this head's keys (`kernels.partial_sums`)."""
        return self._widened()._partial_sums(self._rounded(flat))

    @abstractmethod
    def _partial_sums(self, flat: Tensor) -> Tensor: ...


def require_folded(head: Head, what: str) -> FoldedHead:
    """The head itself, if it is one softmax; an UnsupportedError for a network of heads.

    Args:
        head: the head, or a network.
        what: what needs one softmax, for the message.
    """
    if isinstance(head, FoldedHead):
        return head
    raise UnsupportedError(
        f"{what}: found a network of heads, which each have their own keys and cells; expected a single head",
        "Take one of them, c.head.heads[i], or compile with max_heads=1 and max_layers=1.",
    )


def require_full(head: Head, what: str) -> None:
    """An UnsupportedError for a head of a half type, where only full ones will do."""
    if PRECISIONS.get(head.semantics, DOUBLE).is_half:
        raise UnsupportedError(
            f"{what}: found a head with {head.semantics} values; expected float64 or float32",
            "Compile with dtype=torch.float32.",
        )


class DotProductAttention(nn.Module):
    """The head as `F.scaled_dot_product_attention(q, k, v, scale=1)` with `q = [z − o, 1]`, `k_j = [R(v_j − o), −R|v_j − o|²/2]`.

    o, the middle of the centers, is taken off both sides: a common affine function changes no weight and smaller scores round
    better. In float32 scores near R|v|² still drown their differences: see `certify.dot_product_rounding`.
    """

    origin: Tensor
    key: Tensor
    value: Tensor

    def __init__(self, head: FoldedHead) -> None:
        super().__init__()
        self.input_shapes, self.output_shape = head.input_shapes, head.output_shape
        scores = head.affine_scores(shift=True)
        if scores.value_slopes is not None:
            raise UnsupportedError("the values are affine in z, so there is no plain v; use layers(form='indexed').")
        self.register_buffer("origin", torch.as_tensor(head.middle()).to(head.dtype))
        self.register_buffer("key", torch.as_tensor(np.column_stack([scores.slopes, scores.offsets])).to(head.dtype))
        self.register_buffer("value", torch.as_tensor(scores.values).to(head.dtype).reshape(head.num_keys, -1).clone())

    def query(self, *inputs: Tensor) -> Tensor:
        """`(n, m + 1)`."""
        flat, _ = flatten_inputs(inputs, self.input_shapes, self.key.dtype)
        return torch.cat([flat - self.origin, torch.ones_like(flat[:, :1])], dim=1)

    @certified
    def forward(self, *inputs: Tensor) -> Tensor:
        _, lead = flatten_inputs(inputs, self.input_shapes, self.key.dtype)
        q = self.query(*inputs)
        out = nn.functional.scaled_dot_product_attention(q[None], self.key[None], self.value[None], scale=1.0)
        return out[0].reshape((*lead, *self.output_shape))
