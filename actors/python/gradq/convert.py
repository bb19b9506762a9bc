"""From gradq's checkpoints to PyTorch's optimizers and back.

    python3 -m gradq.convert RUN|FILE.safetensors OUT.pt            for model and torch.optim
    python3 -m gradq.convert IN.pt OUT.safetensors --optimizer adam for `gradq-optimizer --init`
    python3 -m gradq.convert RUN OUT.safetensors                    checkpoint -> start of a new run
    python3 -m gradq.convert RUN OUT.safetensors --weights-only     the trained weights alone

A .pt file is {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, with
--weights-only the model's state_dict itself.  The same as functions:

    model_state, optimizer_state = to_torch(load(path))
    from_torch(model, optimizer).save(path)

Rules: adam, adamw, rmsprop, adagrad, sgd.  Nothing is rounded: what one side cannot do is refused.
torch is imported only where it is needed.
"""
import argparse
import fnmatch
import math
import pickle
import sys
import typing
from pathlib import Path

import numpy

from .checkpoint import State, load, newest, save_weights

# Beyond this many steps a power is taken at once, and may differ in its last bits from the product.
PRODUCT_STEPS_MAX = 10_000_000


class CannotConvert(ValueError):
    """One side has something that the other has not; the message says what."""


class Rule(typing.NamedTuple):
    """A rule here and a class of torch.optim.

    numbers    keys that both sides call alike, with a number each
    fixed      torch's keys that gradq's rule has no counterpart of, and the value they must have
    slots      state vectors, called alike
    must       {our setting: the only word that torch can do}
    """
    torch: str
    numbers: tuple
    fixed: dict
    slots: tuple
    must: dict = {}
    betas: bool = False
    counts: bool = True  # torch keeps "step"


ADAM = {"amsgrad": False, "maximize": False}
RULES = {
    "adam": Rule("Adam", ("lr", "eps", "weight_decay"), ADAM, ("exp_avg", "exp_avg_sq"),
                 {"epsilon": "torch"}, betas=True),
    "adamw": Rule("AdamW", ("lr", "eps", "weight_decay"), ADAM, ("exp_avg", "exp_avg_sq"),
                  betas=True),
    "rmsprop": Rule("RMSprop", ("lr", "alpha", "eps", "momentum"),
                    {"centered": False, "weight_decay": 0, "maximize": False},
                    ("square_avg", "momentum_buffer"), {"epsilon": "outside"}),
    "adagrad": Rule("Adagrad", ("lr", "eps", "initial_accumulator_value"),
                    {"lr_decay": 0, "weight_decay": 0, "maximize": False}, ("sum",)),
    "sgd": Rule("SGD", ("lr", "momentum"),
                {"dampening": 0, "weight_decay": 0, "maximize": False}, ("momentum_buffer",),
                counts=False),
}


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise CannotConvert(f"torch.optim has no counterpart of rule {name}; there are "
                            f"{', '.join(RULES)}.  The weights alone can be had (--weights-only)")
    return RULES[name]


def _idle(slot: str, settings: dict) -> bool:
    """Is this a momentum buffer that nobody uses?  torch has none then."""
    return slot == "momentum_buffer" and ("momentum" not in settings
                                          or _number(settings, "momentum") == 0)


def _number(values: dict, key: str) -> float:
    """Of settings, or of a parameter group."""
    if key not in values:
        raise CannotConvert(f"{key} is missing: this is no whole optimizer's state")
    try:
        return float(values[key])
    except (TypeError, ValueError):
        raise CannotConvert(f"{key} is {values[key]!r}, and no number") from None


# From gradq to PyTorch

def _keywords(state: State, rule: Rule) -> dict:
    """What the class of torch.optim is constructed with."""
    settings = state.settings
    for key, word in rule.must.items():
        if settings.get(key, word) != word:
            raise CannotConvert(f"{key}={settings[key]} of rule {state.optimizer} is nothing that "
                                f"torch.optim.{rule.torch} can do; only {key}={word} is")
    keywords = {key: _number(settings, key) for key in rule.numbers if key in settings}
    if rule.betas:
        keywords["betas"] = (_number(settings, "beta1"), _number(settings, "beta2"))
    if settings.get("nesterov") == "true" and keywords.get("momentum"):
        keywords["nesterov"] = True
    return keywords


def to_torch(state: State, names=None) -> tuple:
    """(model's state_dict, optimizer's state_dict), as copies.

    names   model.named_parameters()'s, in the order that the optimizer was given; None: the
            layout's, which a RemoteOptimizer takes from the model

    lr is that of --set: schedule, warm-up and clipping are gradq's own, and not in a torch
    optimizer.  CannotConvert.
    """
    import torch
    if state.optimizer is None:
        raise CannotConvert("the file holds weights alone, and no optimizer's state")
    rule = _rule(state.optimizer)
    names = list(state.weights) if names is None else list(names)
    if set(names) != set(state.weights) or len(names) != len(state.weights):
        raise CannotConvert("the model's parameters are not those of the checkpoint, which are "
                            f"{', '.join(state.weights)}")
    # torch itself says what a group of this version of it holds.
    blank = [torch.nn.Parameter(torch.zeros(1)) for _ in names]
    groups = getattr(torch.optim, rule.torch)(blank, **_keywords(state, rule)).state_dict()
    moments = {}
    slots = [slot for slot in rule.slots if not _idle(slot, state.settings)]
    for slot in slots:
        if slot not in state.slots:
            raise CannotConvert(f"{slot} of rule {state.optimizer} is missing from the file")
    # Adagrad's begin with the optimizer, all others with the first step.
    if slots and (state.steps or state.optimizer == "adagrad"):
        for index, name in enumerate(names):
            moments[index] = {slot: _torch(state.slots[slot][name]) for slot in slots}
            if rule.counts:
                moments[index]["step"] = torch.tensor(float(state.steps))
    return model_state(state), {"state": moments, "param_groups": groups["param_groups"]}


def model_state(state: State) -> dict:
    """The parameters as tensors, for model.load_state_dict; buffers are the model's own."""
    return {name: _torch(array) for name, array in state.weights.items()}


def _torch(array: numpy.ndarray):
    import torch
    return torch.from_numpy(numpy.array(array, "<f4"))


# From PyTorch to gradq

def _power(beta: float, steps: int) -> float:
    """The product that gradq's rule has come to by then, bit for bit."""
    if steps > PRODUCT_STEPS_MAX:
        return beta ** steps
    power = 1.0
    for _ in range(steps):
        if power == 0:
            break
        power *= beta
    return power


def _settings(groups: list, name: str, rule: Rule) -> dict:
    """{key: text} as --set takes them, of parameter groups that must agree."""
    group = groups[0]
    keys = {*rule.numbers, *rule.fixed, "betas", "nesterov"}
    for key in sorted(keys & group.keys()):
        if any(each.get(key) != group[key] for each in groups):
            raise CannotConvert(f"parameter groups differ in {key}; gradq has one for all")
    for key, value in rule.fixed.items():
        if group.get(key, value) != value:
            raise CannotConvert(f"{key}={group[key]}: gradq's {name} has no {key}; a plug-in of "
                                "your own could have (docs/PLUGINS.md)")
    settings = {key: _number(group, key) for key in rule.numbers if key in group}
    if rule.betas:
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise CannotConvert(f"betas are {betas!r}: {rule.torch} has two; is it another "
                                "optimizer's state?")
        pair = dict(zip(("beta1", "beta2"), betas))
        settings.update({key: _number(pair, key) for key in pair})
    words = {key: repr(value) for key, value in settings.items()}  # exact for a double
    if group.get("nesterov"):
        words["nesterov"] = "true"
    return {**words, **rule.must}


def _steps(moments: dict, names: list) -> int:
    """Of all parameters alike; one that never had a gradient counts like the others."""
    made = {_number(each, "step") for each in moments.values() if "step" in each}
    if any(not math.isfinite(each) or each < 0 or each != int(each) for each in made):
        raise CannotConvert(f"step is {sorted(made)}: a count is needed")
    steps = {int(each) for each in made}
    if len(steps) > 1:
        raise CannotConvert(f"parameters have made {min(steps)} to {max(steps)} steps: gradq "
                            f"counts the steps of all {len(names)} together")
    return steps.pop() if steps else 0


def _numpy(tensor, what: str) -> numpy.ndarray:
    if not hasattr(tensor, "detach"):
        raise CannotConvert(f"{what} is {type(tensor).__name__}, and no tensor")
    return tensor.detach().to("cpu").float().numpy().copy()


def _is_state(optimizer) -> bool:
    """Has it the shape of an optimizer's state_dict?"""
    if not isinstance(optimizer, dict):
        return False
    groups, moments = optimizer.get("param_groups"), optimizer.get("state")
    return (isinstance(groups, list) and len(groups) > 0
            and all(isinstance(each, dict) and isinstance(each.get("params"), list)
                    and all(isinstance(index, int) for index in each["params"]) for each in groups)
            and isinstance(moments, dict) and all(isinstance(each, dict)
                                                  for each in moments.values()))


def from_states(model: dict, optimizer: dict, name: str, names=None) -> State:
    """A State of state_dicts.

    name    of the rule, which an optimizer's state_dict does not tell
    names   of the parameters, in the optimizer's order; None: all of the model's state_dict
    """
    rule = _rule(name)
    if not _is_state(optimizer):
        raise CannotConvert("what should be the optimizer's state is none: a dict with "
                            "\"param_groups\" and \"state\", as optimizer.state_dict() gives it")
    groups = optimizer["param_groups"]
    names = list(model) if names is None else list(names)
    order = [index for group in groups for index in group["params"]]
    if len(order) != len(names):
        raise CannotConvert(f"the optimizer has {len(order)} parameters, but the model "
                            f"{len(names)}: {', '.join(names)}.  Those that are buffers are to be "
                            "left out (--buffer NAME)")
    settings = _settings(groups, name, rule)
    moments = {each: optimizer["state"].get(index, {}) for each, index in zip(names, order)}
    weights = {each: _numpy(model[each], each) for each in model if each in moments}
    steps = _steps(moments, names)
    initial = float(settings.get("initial_accumulator_value", 0))
    slots = {slot: {} for slot in rule.slots}
    for slot in rule.slots:
        for each, array in weights.items():
            found = moments[each].get(slot)  # None: no gradient yet, or no momentum
            slots[slot][each] = (numpy.full_like(array, initial if slot == "sum" else 0)
                                 if found is None else _numpy(found, f"{slot} of {each}"))
            if slots[slot][each].shape != array.shape:
                raise CannotConvert(f"{slot} of {each} has another shape than the parameter: the "
                                    "optimizer's state belongs to another model")
    if not rule.counts:  # steps matter to a schedule only; any state at all means some were made
        steps = int(any(moments.values()))
    scalars = {f"{beta}_power": _power(float(settings[beta]), steps)
               for beta in ("beta1", "beta2") if rule.betas}
    return State(weights, name, steps, slots, scalars, settings)


def from_torch(model, optimizer) -> State:
    """A State of a torch.nn.Module and its torch.optim.Optimizer, to be saved.

    The layout is the optimizer's parameters in the order of model.named_parameters(), as a
    RemoteOptimizer would have it.  CannotConvert.
    """
    kind = type(optimizer).__name__
    name = {rule.torch: name for name, rule in RULES.items()}.get(kind)
    if name is None:
        raise CannotConvert(f"gradq has no counterpart of {kind}; there are "
                            f"{', '.join(rule.torch for rule in RULES.values())}")
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if any(id(each) not in known for each in parameters):
        raise CannotConvert("the optimizer has parameters that are not the model's")
    names = [known[id(each)] for each in parameters]
    values = {each: parameter for each, parameter in model.named_parameters() if each in set(names)}
    return from_states(values, optimizer.state_dict(), name, names)


# The command line

def _read_pt(path, options) -> tuple:
    """(model's state_dict without buffers, optimizer's state_dict or None) of a .pt file."""
    import torch
    try:
        content = torch.load(path, map_location="cpu", weights_only=not options.trust)
    except (EOFError, RuntimeError) as error:
        raise CannotConvert(f"{path}: no .pt file, or cut off: {error}") from None
    except pickle.UnpicklingError as error:
        reason = (str(error) or "no .pt file").splitlines()[0]
        raise CannotConvert(
            f"{path}: {reason}.  Such a file may run code when it is read: if you trust it, add "
            "--trust (PyTorch 1.13 needs it for every optimizer's state)") from None
    whole = isinstance(content, dict) and isinstance(content.get("model"), dict)
    model = content["model"] if whole else content
    if not isinstance(model, dict) or not all(isinstance(each, torch.Tensor)
                                              for each in model.values()):
        raise CannotConvert(f'{path} is neither {{"model": state_dict, "optimizer": state_dict}} '
                            "nor a state_dict of tensors")
    model = {name: each for name, each in model.items()
             if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.buffer)}
    odd = [name for name, each in model.items() if not each.is_floating_point()]
    if odd:
        raise CannotConvert(f"{', '.join(odd)}: no floating-point numbers; if these are buffers, "
                            "leave them out (--buffer NAME)")
    return model, content.get("optimizer") if whole else None


def _input(options) -> State:
    path = Path(options.input)
    if path.suffix not in (".pt", ".pth"):
        return load(newest(path) if path.is_dir() else path)
    model, optimizer = _read_pt(path, options)
    if options.weights_only:
        return State({name: _numpy(each, name) for name, each in model.items()})
    if optimizer is None or options.optimizer is None:
        raise CannotConvert("moments need \"optimizer\" in the file and --optimizer RULE here "
                            f"({', '.join(RULES)}); or take --weights-only")
    return from_states(model, optimizer, options.optimizer)


def _output(state: State, options):
    path = Path(options.output)
    if path.suffix in (".pt", ".pth"):
        import torch
        whole = None if options.weights_only else to_torch(state)
        torch.save(model_state(state) if whole is None
                   else {"model": whole[0], "optimizer": whole[1]}, path)
        print(f"{path}: model{'' if whole is None else ' and optimizer'}")
    elif options.weights_only:
        save_weights(path, state.weights)
        print(f"{path}: weights")
    elif state.optimizer is None:
        raise CannotConvert(f"{options.input} holds weights alone; add --weights-only")
    else:
        state.save(path)
        print(f"{path}: start with", " ".join(state.words()), f"--init {path}")


def main(words=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m gradq.convert", allow_abbrev=False,
        description="Convert between gradq's checkpoints and PyTorch's optimizers.")
    parser.add_argument("input", metavar="IN",
                        help="a run directory (its newest checkpoint), .safetensors or .pt")
    parser.add_argument("output", metavar="OUT", help="a .safetensors or .pt file")
    parser.add_argument("--weights-only", action="store_true",
                        help="leave out what the optimizer remembers")
    parser.add_argument("--optimizer", choices=list(RULES), metavar="RULE",
                        help=f"rule of a .pt file's optimizer: {', '.join(RULES)}")
    parser.add_argument("--buffer", action="append", default=[], metavar="NAME",
                        help="leave this out of a .pt file's model, as * and ? match; repeatable")
    parser.add_argument("--trust", action="store_true",
                        help="read a .pt file that may run code: one of your own")
    options = parser.parse_args(words)
    if Path(options.output).suffix not in (".safetensors", ".pt", ".pth"):
        parser.error(f"{options.output} ends in neither .safetensors nor .pt")
    try:
        _output(_input(options), options)
    except ImportError as error:
        print(f"gradq.convert: {error}; .pt files need PyTorch", file=sys.stderr)
    except (OSError, ValueError, RuntimeError) as error:
        about = "" if options.input in str(error) else f"{options.input}: "
        print(f"gradq.convert: {about}{error}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
