"""gradq.torch.RemoteOptimizer: a torch.optim.Optimizer whose step happens in gradq's optimizer.

    model = Net()
    with RemoteOptimizer(model.named_parameters(), address) as optimizer:
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()              # pushes the gradient, installs the newest weights

The only module of the package that imports torch.  Nothing here keeps moments, or a learning rate:
rule, moments, schedule and clipping by --set are the optimizer process's own.
"""
import os
import warnings

import numpy
import torch

from .client import Client
from .errors import LayoutMismatch

# Stands in param_groups, where schedulers look for a learning rate; it has no effect.
LR = 1.0


def _named(named_parameters) -> dict:
    pairs = list(named_parameters)
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
                            and isinstance(pair[1], torch.Tensor) for pair in pairs):
        raise TypeError("RemoteOptimizer needs named parameters: give model.named_parameters()")
    named = dict(pairs)
    if len(named) != len(pairs):
        raise LayoutMismatch("two parameters have one name: each needs its own")
    for name, parameter in named.items():
        if not parameter.is_floating_point():
            raise LayoutMismatch(f"parameter {name} is {parameter.dtype}: only real floating-point "
                                 "parameters travel, as float32")
    return named


class RemoteOptimizer(torch.optim.Optimizer):
    """Push gradients of these parameters to the run at `address`, and take its weights.

    named_parameters   model.named_parameters(): names, shapes and order are the run's layout, or
                       become it; the first actor of a run brings its weights, too, and all others
                       begin with those
    address            of the run; None: GRADQ_ADDRESS
    synchronous        step() waits for the step that its gradient was in; None: when the run has
                       --max-staleness 0
    samples            behind a gradient, unless step() is told otherwise
    client_options     of gradq.Client: actor, window, timeout, encoding, ...

    Parameters of any floating-point type on any device; they travel as float32.  One without a
    gradient counts as a gradient of zeros: leave out of `named_parameters` what is to stay as it
    is (rules with weight decay or momentum move a parameter whose gradient is zero).  Buffers, as
    of batch normalisation, stay local.

    Learning rate.  The run's --set lr and --set schedule decide.  A scheduler may change `lr` of
    param_groups, but nothing reads it; the first step after that warns.
    """

    def __init__(self, named_parameters, address: str = None, *, synchronous: bool = None,
                 samples: int = 1, **client_options):
        named = _named(named_parameters)
        address = address or os.environ.get("GRADQ_ADDRESS")
        if not address:
            raise ValueError("no address: give one, or set GRADQ_ADDRESS")
        self._client = None
        super().__init__(named.values(), {"lr": LR})
        self._names, self._parameters = list(named), list(named.values())
        self._samples, self._warned = samples, False
        self._client = Client(address, initial={
            name: parameter.detach().to("cpu", torch.float32).numpy()
            for name, parameter in named.items()}, **client_options)
        self.synchronous = (self._client.max_staleness == 0 if synchronous is None
                            else bool(synchronous))
        self._installed = None
        self.pull()

    def __enter__(self) -> "RemoteOptimizer":
        return self

    def __exit__(self, *exception):
        self._client.__exit__(*exception)

    @property
    def client(self) -> Client:
        """For counts, metrics and the layout."""
        return self._client

    @property
    def version(self) -> int:
        """Of the weights that the parameters hold."""
        return self._client.version

    @property
    def staleness(self):
        """Client.staleness: steps of others behind the gradient that was settled last."""
        return self._client.staleness

    @property
    def refused(self) -> dict:
        """{reason: gradients}: Client.refused_by."""
        return self._client.refused_by

    @torch.no_grad()
    def pull(self) -> int:
        """Install the newest weights that are here; their version.  Never waits."""
        weights = self._client.pull()
        if weights is not self._installed:
            base = torch.from_numpy(weights.base)
            at = 0
            for parameter in self._parameters:
                count = parameter.numel()
                parameter.copy_(base[at:at + count].view(parameter.shape))
                at += count
            self._installed = weights
        return weights.version

    @torch.no_grad()
    def _fill(self, vector: numpy.ndarray):
        """f32[parameters] of all gradients; to() of a device waits until it is there."""
        flat, at = torch.from_numpy(vector), 0
        for parameter in self._parameters:
            place = flat[at:at + parameter.numel()]
            if parameter.grad is None:
                place.zero_()
            else:
                gradient = parameter.grad.detach()
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                place.copy_(gradient.reshape(-1))
            at += parameter.numel()

    def step(self, closure=None, samples: int = None):
        """Push the gradient, and install the newest weights; with `synchronous` those that its step
        led to.  closure: as ever, computes the loss and the gradients anew; its loss is returned.

        The gradient is one of the weights that pull() or step() installed last.  Raises what
        Client.commit and Client.wait do; a gradient that was not sent may be stepped again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_at_rates()
        self._fill(self._client.reserve())
        number = self._client.commit(self._samples if samples is None else samples)
        if self.synchronous:
            self._client.wait(number)
        self.pull()
        return loss

    def _look_at_rates(self):
        if not self._warned and any(group["lr"] != LR for group in self.param_groups):
            self._warned = True
            warnings.warn("RemoteOptimizer: a learning rate that is set here has no effect; the "
                          "optimizer process decides (--set lr=..., --set schedule=...)",
                          stacklevel=3)

    def add_param_group(self, param_group: dict):
        if self._client is not None:
            raise LayoutMismatch("the run's layout is settled: give all parameters at the start")
        super().add_param_group(param_group)

    def close(self, timeout: float = None):
        """Client.close: wait until all is settled, and end."""
        self._client.close(timeout)

    def state_dict(self) -> dict:
        """What is here: names, and which version the parameters hold.  Moments and steps are in
        the run's checkpoints, which also begin a new run (--resume, --init)."""
        return {**super().state_dict(), "gradq": {
            "names": list(self._names), "run": self._client.run, "term": self._client.term,
            "version": self.version}}

    def load_state_dict(self, state_dict: dict):
        """Of the same parameters; LayoutMismatch otherwise.  The run stays as it is, and so do its
        weights: what a model file holds is overwritten by the next pull() or step()."""
        names = state_dict.get("gradq", {}).get("names")
        if names != self._names:
            raise LayoutMismatch("this state is of other parameters, or of another optimizer; "
                                 "moments are in the run's checkpoints")
        super().load_state_dict({key: value for key, value in state_dict.items()
                                 if key != "gradq"})
        self._installed = None
        self.pull()

    def __getstate__(self):
        raise TypeError("a RemoteOptimizer has sockets: it cannot be pickled or copied; use "
                        "state_dict(), or open another one")

    def __repr__(self) -> str:
        return f"RemoteOptimizer ({self._client!r})"
