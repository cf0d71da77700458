"""Types of arguments: what annotations name."""

from typing import Any, Protocol, TypeVar


class Array(Protocol):
    """A NumPy array, or any array in CPU memory with ``__dlpack__``: torch's, jax's, ..."""

    def __dlpack__(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=Array)  #: of the results: the kind of array that query is
