"""A torch without tensors: shapes, dtypes and strides, as far as the checks of packages read them."""

from __future__ import annotations

import math
from typing import Any, Final, Self


class Dtype:
    """One of torch's dtypes."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name = name
        self.itemsize = itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    """The device of every tensor."""

    type = "cuda"
    index = 0

    def __repr__(self) -> str:
        return "cuda:0"


DTYPES: Final = {
    name: Dtype(name, size)
    for name, size in {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "uint8": 1,
        "bool": 1,
    }.items()
}
DEVICE: Final = Device()


class Tensor:
    """A contiguous tensor of which nobody needs the values.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether a gradient is wanted.
    """

    device = DEVICE
    is_cuda = True
    is_nested = False
    layout = "torch.strided"
    grad_fn = None

    def __init__(self, shape: tuple[int, ...], dtype: Dtype, requires_grad: bool = False) -> None:
        self.shape = shape
        self.dtype = dtype
        self.requires_grad = requires_grad

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def T(self) -> Tensor:  # noqa: N802 - torch's name
        """The tensor with its dimensions reversed."""
        return Tensor(self.shape[::-1], self.dtype)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def dim_order(self) -> tuple[int, ...]:
        """Return the dimensions as they lie in memory."""
        return tuple(range(len(self.shape)))

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one length of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of a contiguous tensor."""
        strides = tuple(math.prod(self.shape[place + 1 :]) for place in range(len(self.shape)))
        return strides if dim is None else strides[dim]

    def is_contiguous(self, **_: object) -> bool:
        """Say that it is."""
        return True

    def data_ptr(self) -> int:
        """Return an aligned address."""
        return 0

    storage_offset = data_ptr

    def get_device(self) -> int:
        """Return the index of the device."""
        return 0

    def _same(self, *_: object, **__: object) -> Self:
        return self

    contiguous = detach = clone = cuda = _same
    zero_ = fill_ = copy_ = requires_grad_ = record_stream = _same

    def to(self, *what: object, dtype: Dtype | None = None, **_: object) -> Tensor:
        """Return the tensor in another dtype."""
        wanted = next((one for one in (dtype, *what) if isinstance(one, Dtype)), self.dtype)
        return Tensor(self.shape, wanted)

    def float(self) -> Tensor:
        """Return the tensor in float32."""
        return self.to(DTYPES["float32"])

    def new_empty(self, *shape: Any, dtype: Dtype | None = None, **_: object) -> Tensor:
        """Return another tensor."""
        return empty(*shape, dtype=dtype or self.dtype)

    def view(self, *shape: Any) -> Tensor:
        """Return the tensor in another shape, or read as another dtype of the same size."""
        if isinstance(shape[0], Dtype):
            return Tensor(self.shape, shape[0])
        lengths = _lengths(shape)
        known = math.prod(length for length in lengths if length != -1)
        return Tensor(tuple(self.numel() // max(known, 1) if n == -1 else n for n in lengths), self.dtype)

    reshape = view

    def transpose(self, first: int, second: int) -> Tensor:
        """Return the tensor with two dimensions exchanged."""
        shape = list(self.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return Tensor(tuple(shape), self.dtype)

    def permute(self, *dims: int) -> Tensor:
        """Return the tensor with its dimensions in another order."""
        return Tensor(tuple(self.shape[dim] for dim in _lengths(dims)), self.dtype)

    def unsqueeze(self, dim: int) -> Tensor:
        """Return the tensor with a dimension of one more."""
        place = dim % (self.ndim + 1)
        return Tensor((*self.shape[:place], 1, *self.shape[place:]), self.dtype)

    def squeeze(self, dim: int) -> Tensor:
        """Return the tensor without a dimension of one."""
        place = dim % self.ndim
        kept = self.shape[:place] + self.shape[place + 1 :]
        return Tensor(kept if self.shape[place] == 1 else self.shape, self.dtype)

    def __getitem__(self, key: object) -> Tensor:
        return self


def _lengths(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape


def empty(*shape: Any, dtype: Dtype = DTYPES["float32"], requires_grad: bool = False, **_: object) -> Tensor:
    """Make a tensor."""
    return Tensor(_lengths(shape), dtype, requires_grad)


def empty_like(other: Tensor, dtype: Dtype | None = None, **_: object) -> Tensor:
    """Make a tensor of the same shape."""
    return Tensor(other.shape, dtype or other.dtype)


def _as_operator(function: Any) -> Any:
    """Leave a function as it is, with what may be registered of an operator."""
    function.register_fake = function.register_autograd = lambda *_, **__: None
    return function


def torch_names() -> dict[str, object]:
    """Return the names of torch that have a meaning here, by dotted name."""
    made = dict.fromkeys(("empty", "zeros", "ones"), empty)
    like = dict.fromkeys(("empty_like", "zeros_like", "ones_like"), empty_like)
    names = {
        **DTYPES,
        **made,
        **like,
        "Tensor": Tensor,
        "dtype": Dtype,
        "device": Device,
        "is_tensor": lambda value: isinstance(value, Tensor),
        "is_grad_enabled": lambda: False,
        "compiler.is_compiling": lambda: False,
        "library.custom_op": lambda *_, **__: _as_operator,
        "version.cuda": "13.0",
    }
    return {f"torch.{name}": value for name, value in names.items()}
