"""gradq for actors in Python: pyzmq and NumPy, nothing compiled.

    Client                push gradients, take whole versions of the weights
    gradq.torch           RemoteOptimizer, a torch.optim.Optimizer; imports torch, and by name only
    gradq.checkpoint      what a run has saved, as arrays
    gradq.convert         checkpoints from and to PyTorch's optimizers; also a command
    Error and its kinds   see gradq/errors.py

Written from docs/PROTOCOL.md.  README.md beside this package has examples.
"""
from .client import Client, Weights
from .errors import (Closed, Error, Fenced, LayoutMismatch, Refused, RunReplaced, Timeout,
                     Unreachable)

__version__ = "0.1.0"  # of include/gradq/gradq.h
__all__ = ["Client", "Weights", "Error", "Unreachable", "Timeout", "LayoutMismatch", "Refused",
           "Fenced", "RunReplaced", "Closed"]
