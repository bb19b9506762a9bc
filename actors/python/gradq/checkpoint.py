"""Checkpoints of a run, and other safetensors files of float32, in NumPy.

    load(path)                   -> State: weights, and what the update rule remembers
    State.save(path)             a state file: `--init` starts a run with it, moments and all
    save_weights(path, weights)  the weights alone, a plain safetensors file
    newest(run)                  the newest checkpoint in a run directory

The `safetensors` package opens all of them.  It is not used here, for it writes tensors in the
order of their names, and the order in a plain file is the layout of the run that begins with it.

Never writes a checkpoint: that is a run's own, with hashes and its place in the journal.
docs/PROTOCOL.md, "Checkpoints", has the names and keys.
"""
import dataclasses
import json
import math
import os
import struct
from pathlib import Path

import numpy

from .errors import LayoutMismatch
from .layout import Layout

CHECKPOINT, STATE = "gradq-checkpoint-1", "gradq-state-1"
HEADER_BYTES_MAX = 100_000_000  # what the format's reference reader accepts


class Malformed(ValueError):
    """The file is not what it should be; the message says how."""


def _tensor(path, name: str, entry, data: memoryview) -> numpy.ndarray:
    """One tensor of the file; a read-only view of its bytes."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise Malformed(f"{path}: tensor {name!r} has no sound dtype, shape and data_offsets")
    if dtype != "F32":
        raise Malformed(f"{path}: tensor {name} is {dtype}; only float32 is trained here, convert "
                        "it to F32 first")
    if not begin <= end <= len(data) or end - begin != 4 * math.prod(shape):
        raise Malformed(f"{path}: tensor {name} does not lie in the file; it is damaged or cut off")
    return numpy.frombuffer(data[begin:end], "<f4").reshape(shape)


def _once(pairs: list) -> dict:
    """A JSON object whose keys differ: which one of two would count is nobody's to say."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def read(path) -> tuple:
    """(tensors, metadata) of a safetensors file: {name: float32 array} in the order of their data,
    {key: text}.  OSError, Malformed."""
    data = memoryview(Path(path).read_bytes())
    size, = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    if not 2 <= size <= min(len(data) - 8, HEADER_BYTES_MAX):
        raise Malformed(f"{path}: no safetensors file, or cut off in its header")
    try:
        header = json.loads(bytes(data[8:8 + size]), object_pairs_hook=_once)
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise Malformed(f"{path}: no safetensors file: its header is no JSON object with each name "
                        "once and texts in __metadata__") from None
    tensors = {name: _tensor(path, name, entry, data[8 + size:]) for name, entry in header.items()}
    return dict(sorted(tensors.items(),
                       key=lambda pair: header[pair[0]]["data_offsets"])), metadata


def write(path, tensors: dict, metadata: dict = None):
    """A safetensors file with the arrays as float32, in their order.  Whole or not at all."""
    arrays = {name: numpy.asarray(array, "<f4") for name, array in tensors.items()}
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new = f"{path}.{os.getpid()}.new"
    try:
        with open(new, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in arrays.values():
                file.write(array.tobytes())
        os.replace(new, path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


def save_weights(path, weights: dict):
    """The weights alone, for whoever uses the trained model: what safetensors.torch.load_file gives
    goes into model.load_state_dict, and `--init` starts a run with it."""
    Layout({name: numpy.shape(array) for name, array in weights.items()})  # or LayoutMismatch
    write(path, weights, {"format": "pt"})  # the word that loaders of PyTorch's models look for


@dataclasses.dataclass
class State:
    """Weights, and what an update rule remembers of them.

    weights    {parameter: float32 array}, in the layout's order
    optimizer  name of the rule; None: the file holds weights alone
    steps      that the rule has made
    slots      {slot: {parameter: float32 array}}, as in "exp_avg"
    scalars    {scalar: float}, as in "beta1_power"
    settings   {key: text} of rule and host, as --set takes them
    version    of the weights; None outside a run
    """
    weights: dict
    optimizer: str = None
    steps: int = 0
    slots: dict = dataclasses.field(default_factory=dict)
    scalars: dict = dataclasses.field(default_factory=dict)
    settings: dict = dataclasses.field(default_factory=dict)
    version: int = None

    def save(self, path):
        """A file for `gradq-optimizer --init`: a run of the same rule goes on with all of this."""
        if self.optimizer is None:
            raise ValueError("there is no optimizer's state to save; save_weights() takes weights")
        layout = Layout({name: array.shape for name, array in self.weights.items()})
        tensors = dict(self.weights)
        for slot, arrays in self.slots.items():
            if {name: array.shape for name, array in arrays.items()} != layout.shapes:
                raise LayoutMismatch(f"slot {slot} has not the names and shapes of the weights")
            tensors.update({f"{slot}.{name}": arrays[name] for name in layout.shapes})
        if len(tensors) != len(self.weights) * (1 + len(self.slots)):
            raise LayoutMismatch("a parameter is called as a slot of another one; rename it")
        write(path, tensors, {
            "format": STATE, "layout": json.dumps(layout.to_json()), "optimizer": self.optimizer,
            "optimizer_steps": str(self.steps),
            **{f"scalar.{name}": repr(float(value)) for name, value in self.scalars.items()},
            **{f"set.{key}": text for key, text in self.settings.items()}})

    def words(self) -> list:
        """What to give gradq-optimizer or `tools/gradq up`, so that it goes on alike."""
        return ["--optimizer", self.optimizer] + [
            word for key, text in self.settings.items() for word in ("--set", f"{key}={text}")]


def _below(metadata: dict, prefix: str) -> dict:
    return {key[len(prefix):]: text for key, text in metadata.items() if key.startswith(prefix)}


def _count(metadata: dict, key: str) -> int:
    if not (text := metadata[key]).isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(f"{key} is no count")
    return int(text)


def load(path) -> State:
    """Of a checkpoint, a state file, or any safetensors file of float32, which holds weights alone.
    OSError, Malformed.  Hashes are not looked at: gradq-replay --verify does."""
    tensors, metadata = read(path)
    if metadata.get("format") not in (CHECKPOINT, STATE):
        return State(tensors)
    try:
        layout = Layout.from_json(json.loads(metadata["layout"]))
        first = next(iter(layout.shapes))
        # Words have no dot: "retired.<rule>.<slot>." and "held." are no slots of this rule.
        names = [name[:-len(first) - 1] for name in tensors
                 if name.endswith("." + first) and name not in layout.shapes]
        slots = {slot: {name: tensors[f"{slot}.{name}"] for name in layout.shapes}
                 for slot in names if "." not in slot and slot != "held"}
        weights = {name: tensors[name] for name in layout.shapes}
        if any({name: array.shape for name, array in each.items()} != layout.shapes
               for each in (weights, *slots.values())):
            raise ValueError("a shape is not the layout's")
        return State(weights, metadata["optimizer"], _count(metadata, "optimizer_steps"), slots,
                     {name: float(text) for name, text in _below(metadata, "scalar.").items()},
                     _below(metadata, "set."),
                     _count(metadata, "version") if "version" in metadata else None)
    except (KeyError, ValueError) as error:
        raise Malformed(f"{path}: no sound {metadata['format']} file: {error}") from None


def newest(run) -> Path:
    """The newest checkpoint in a run directory.  FileNotFoundError when there is none."""
    paths = sorted(Path(run).glob("checkpoints/checkpoint-*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{run} holds no checkpoint; is it a run directory, and has the "
                                "run had weights yet? (tools/gradq checkpoint)")
    return paths[-1]
