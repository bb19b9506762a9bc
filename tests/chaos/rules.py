"""A step of the weights in plain NumPy float32, from docs/PROTOCOL.md ("The step") and the formulas
in docs/PLUGINS.md and the papers: every rule, clipping and the schedules of the learning rate.

Never through gradq's code: that is what it is compared with, bit for bit.
"""
import math

import numpy

F32 = numpy.float32
BLOCK, LANES = 4096, 16
PI = float.fromhex("0x1.921fb54442d18p+1")


def sum_squares(x: numpy.ndarray) -> float:
    """In double: lanes, halves of the lanes, then blocks as a binary counter carries."""
    blocks = -(-x.size // BLOCK)
    rows = -(-min(x.size, BLOCK) // LANES)
    padded = numpy.zeros(blocks * BLOCK)  # zeros at the end: adding 0 to a square is exact
    padded[:x.size] = x
    squares = (padded * padded).reshape(blocks, BLOCK // LANES, LANES)
    lanes = numpy.zeros((blocks, LANES))
    for row in range(rows):
        lanes += squares[:, row, :]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    tree = {}
    for total in lanes[:, 0].tolist():
        level = 0
        while level in tree:
            total = tree.pop(level) + total
            level += 1
        tree[level] = total
    total = 0.0
    for level in sorted(tree):
        total = tree[level] + total
    return total


def cos_pi(x: float) -> float:
    y = PI * (x if x <= 0.5 else 1 - x)
    term = total = 1.0
    for k in range(2, 25, 2):
        term *= -(y * y) / (k * (k - 1))
        total += term
    return total if x <= 0.5 else -total


def schedule_factor(settings: dict, step: int) -> float:
    total, warmup = float(settings["schedule_steps"]), float(settings["warmup_steps"])
    before = step - 1.0
    if before < warmup:
        return step / warmup
    if settings["schedule"] == "constant":
        return 1.0
    if before >= total:
        return 0.0
    done = (before - warmup) / (total - warmup)
    return 1 - done if settings["schedule"] == "linear" else (1 + cos_pi(done)) / 2


class Rule:
    """Constants are doubles, rounded once; slots and scalars are called as in checkpoints."""
    slots, scalars = (), ()

    def __init__(self, name: str, settings: dict, count: int):
        self.name, self.set = name, settings
        self.state = {slot: numpy.full(count, self.initial(slot), F32) for slot in self.slots}
        self.numbers = dict.fromkeys(self.scalars, 1.0)  # the only ones there are: powers of betas
        self.steps = 0

    def number(self, key: str) -> float:
        return float(self.set[key])

    def initial(self, _slot: str) -> float:
        return 0

    def resume(self, other):
        """Go on with what another life of the same rule left."""
        self.state, self.numbers, self.steps = other.state, other.numbers, other.steps

    def step(self, w: numpy.ndarray, gradient: numpy.ndarray, scale) -> numpy.ndarray:
        clip = self.number("clip_norm")
        if clip != 0:
            norm = abs(float(scale)) * math.sqrt(sum_squares(gradient))
            factor = clip / (norm + 1e-6)
            if factor < 1:
                scale = F32(float(scale) * factor)
        self.steps += 1
        lr = self.number("lr") * schedule_factor(self.set, self.steps)
        return self.formula(w, gradient * scale, lr)

    def formula(self, w, g, lr: float):
        raise NotImplementedError


class Sgd(Rule):
    slots = ("momentum_buffer",)

    def formula(self, w, g, lr):
        momentum = F32(self.number("momentum"))
        if momentum == 0:
            return w - F32(lr) * g
        b = self.state["momentum_buffer"] = momentum * self.state["momentum_buffer"] + g
        return w - F32(lr) * (g + momentum * b if self.set["nesterov"] == "true" else b)


class Adam(Rule):
    slots = ("exp_avg", "exp_avg_sq")
    scalars = ("beta1_power", "beta2_power")

    def moments(self, g):
        """m, v, and what each is divided by."""
        beta1, beta2 = self.number("beta1"), self.number("beta2")
        self.numbers["beta1_power"] *= beta1
        self.numbers["beta2_power"] *= beta2
        m = F32(beta1) * self.state["exp_avg"] + F32(1 - beta1) * g
        v = F32(beta2) * self.state["exp_avg_sq"] + F32(1 - beta2) * (g * g)
        self.state.update(exp_avg=m, exp_avg_sq=v)
        return (m, v, 1 - self.numbers["beta1_power"],
                math.sqrt(1 - self.numbers["beta2_power"]))

    def formula(self, w, g, lr):
        m, v, mean, root = self.moments(g + F32(self.number("weight_decay")) * w)
        if self.set["epsilon"] == "torch":
            step, root = F32(lr / mean), F32(1 / root)
        else:
            step, root = F32(lr * root / mean), F32(1)
        return w - step * (m / (numpy.sqrt(v) * root + F32(self.number("eps"))))


class Adamw(Adam):
    def formula(self, w, g, lr):
        m, v, mean, root = self.moments(g)
        keep = F32(1 - lr * self.number("weight_decay"))
        move = m / (numpy.sqrt(v) * F32(1 / root) + F32(self.number("eps")))
        return w * keep - F32(lr / mean) * move


class Rmsprop(Rule):
    slots = ("square_avg", "momentum_buffer")

    def formula(self, w, g, lr):
        alpha, momentum = self.number("alpha"), F32(self.number("momentum"))
        eps = F32(self.number("eps"))
        v = F32(alpha) * self.state["square_avg"] + F32(1 - alpha) * (g * g)
        self.state["square_avg"] = v
        d = g / (numpy.sqrt(v + eps) if self.set["epsilon"] == "inside" else numpy.sqrt(v) + eps)
        if momentum != 0:
            d = self.state["momentum_buffer"] = momentum * self.state["momentum_buffer"] + d
        return w - F32(lr) * d


class Adagrad(Rule):
    slots = ("sum",)

    def initial(self, _slot):
        return self.number("initial_accumulator_value")

    def formula(self, w, g, lr):
        s = self.state["sum"] = self.state["sum"] + g * g
        below = numpy.sqrt(s) + F32(self.number("eps"))
        moved = numpy.divide(g, below, out=numpy.zeros_like(g), where=below > 0)
        return w - F32(lr) * moved


class Lion(Rule):
    slots = ("exp_avg",)

    def formula(self, w, g, lr):
        beta1, beta2 = self.number("beta1"), self.number("beta2")
        m = self.state["exp_avg"]
        c = F32(beta1) * m + F32(1 - beta1) * g
        self.state["exp_avg"] = F32(beta2) * m + F32(1 - beta2) * g
        keep = F32(1 - lr * self.number("weight_decay"))
        return w * keep - numpy.sign(c) * F32(lr)


RULES = {"sgd": Sgd, "adam": Adam, "adamw": Adamw, "rmsprop": Rmsprop, "adagrad": Adagrad,
         "lion": Lion}
