"""The model as the wire has it: named float32 tensors, one after another in one flat vector.

No sockets, no clock.  docs/PROTOCOL.md, "Layout", has the rules; the service checks them too.
"""
import math
import operator
from collections.abc import Mapping

import numpy

from .errors import LayoutMismatch
from .frame import PARAMETERS_MAX

TENSORS_MAX, RANK_MAX, NAME_BYTES_MAX = 4096, 8, 127


def _is_name(name) -> bool:
    try:
        return 1 <= len(name.encode()) <= NAME_BYTES_MAX and "\0" not in name
    except (AttributeError, UnicodeEncodeError):
        return False


def _shape(name, shape) -> tuple:
    try:
        return tuple(operator.index(size) for size in shape)
    except TypeError:
        raise LayoutMismatch(f"tensor {name} has shape {shape!r}: a tuple of whole numbers is "
                             "needed") from None


def _numbers(array, what: str) -> numpy.ndarray:
    """The array, whose elements a float32 can stand for."""
    if isinstance(array, numpy.ma.MaskedArray):
        raise LayoutMismatch(f"{what} is a masked array: give plain numbers, as .filled(0) does")
    array = numpy.asarray(array)
    if array.dtype.kind not in "fiub":
        raise LayoutMismatch(f"{what} is of type {array.dtype}: real numbers are needed, as "
                             ".astype('float32') gives them")
    return array


def _check(shapes: dict):
    if not 1 <= len(shapes) <= TENSORS_MAX:
        raise LayoutMismatch(f"a layout has 1 to {TENSORS_MAX} tensors, not {len(shapes)}")
    for name, shape in shapes.items():
        if not _is_name(name):
            raise LayoutMismatch(f"tensor name {name!r}: a string of 1 to {NAME_BYTES_MAX} bytes "
                                 "of UTF-8, without NUL, is needed")
        if len(shape) > RANK_MAX or any(size < 1 for size in shape):
            raise LayoutMismatch(f"tensor {name} has shape {shape}: up to {RANK_MAX} dimensions, "
                                 "each at least 1, are allowed")
    count = sum(math.prod(shape) for shape in shapes.values())
    if count > PARAMETERS_MAX:
        raise LayoutMismatch(f"{count} elements in all: up to {PARAMETERS_MAX} are allowed")


class Layout:
    """shapes: {name: shape}, in order.  LayoutMismatch when the protocol does not allow it."""

    def __init__(self, shapes: Mapping):
        self.shapes = {name: _shape(name, shape) for name, shape in shapes.items()}
        _check(self.shapes)
        self.places, at = {}, 0  # {name: slice of the vector}
        for name, shape in self.shapes.items():
            self.places[name] = slice(at, at + math.prod(shape))
            at += math.prod(shape)
        self.count = at

    @classmethod
    def from_json(cls, tensors) -> "Layout":
        """Of hello's answer; ValueError (LayoutMismatch is one) for anything else."""
        try:
            shapes = {each["name"]: each["shape"] for each in tensors}
            sound = len(shapes) == len(tensors) and all(
                type(size) is int for shape in shapes.values() for size in shape)
        except (TypeError, KeyError):
            sound = False
        if not sound:
            raise ValueError("no list of named shapes")
        return cls(shapes)

    def to_json(self) -> list:
        return [{"name": name, "shape": list(shape)} for name, shape in self.shapes.items()]

    def split(self, vector: numpy.ndarray) -> dict:
        """{name: array}; views of f32[count]."""
        return {name: vector[self.places[name]].reshape(shape)
                for name, shape in self.shapes.items()}

    def join(self, arrays, vector: numpy.ndarray):
        """Fill f32[count] from {name: array of its shape}, or from a flat array of all elements."""
        if not isinstance(arrays, Mapping):
            flat = _numbers(arrays, "what came")
            if flat.shape != (self.count,):
                raise LayoutMismatch(f"an array of shape {flat.shape} came; the model has "
                                     f"{self.count} elements: give them flat, or by name")
            vector[:] = flat
            return
        wrong = [f"{name} is missing" for name in self.shapes if name not in arrays]
        wrong += [f"{name} is no tensor of the model" for name in arrays if name not in self.shapes]
        for name, shape in self.shapes.items():
            if name in arrays:
                array = _numbers(arrays[name], name)
                if array.shape != shape:
                    wrong.append(f"{name} has shape {array.shape}, not {shape}")
                else:
                    vector[self.places[name]] = array.ravel()
        if wrong:
            raise LayoutMismatch("; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else ""))

    def __eq__(self, other) -> bool:
        return isinstance(other, Layout) and list(self.shapes.items()) == list(other.shapes.items())

    __hash__ = None
