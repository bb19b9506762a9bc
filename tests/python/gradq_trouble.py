"""Environments that misbehave, for tests/test_gym.c: gym:gradq_trouble:NAME-v0."""

import os
import time

import gymnasium
import numpy


class Trouble(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.zeros(1, numpy.float32), {}

    def step(self, action):
        return numpy.zeros(1, numpy.float32), 1.0, False, False, {}


class Raises(Trouble):
    def step(self, action):
        raise RuntimeError("the motor is on fire")


class Prints(Trouble):
    def step(self, action):
        print("hello, descriptor 1")
        os.write(1, b"hello again\n")
        return super().step(action)


class Dies(Trouble):
    def step(self, action):
        os._exit(3)


class Hangs(Trouble):
    def step(self, action):
        while True:
            time.sleep(1000)


class NotFinite(Trouble):
    def step(self, action):
        return numpy.zeros(1, numpy.float32), float("nan"), False, False, {}


class Grows(Trouble):
    def step(self, action):
        return numpy.zeros(2, numpy.float32), 1.0, False, False, {}


class Busy(Trouble):
    """Tells its process id to the FIFO `path` from within a step that never ends."""

    def __init__(self, path=""):
        self.path = path

    def step(self, action):
        with open(self.path, "w") as file:
            file.write(str(os.getpid()))
        while True:
            time.sleep(1000)


class Image(Trouble):
    """2 x 3 pixels of three channels: 100 * channel + 10 * row + column."""

    observation_space = gymnasium.spaces.Box(0, 255, (2, 3, 3), numpy.uint8)

    def reset(self, *, seed=None, options=None):
        row, column, channel = numpy.indices((2, 3, 3))
        return (100 * channel + 10 * row + column).astype(numpy.uint8), {}


class Shifted(Trouble):
    """Actions 5, 6, 7; the reward is the action.  The keyword arguments end as the observation."""

    action_space = gymnasium.spaces.Discrete(3, start=5)
    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2, 2), numpy.float64)

    def __init__(self, number=0, flag=False, word=""):
        self.values = [[number, flag], [len(word), 0]]

    def reset(self, *, seed=None, options=None):
        return numpy.array(self.values, numpy.float64), {}

    def step(self, action):
        return numpy.array(self.values, numpy.float64), float(action), action == 6, action == 7, {}


class Painted(Trouble):
    """Shows height x width pixels of `dtype`: 100 * channel + 10 * row + column + steps."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None, height=2, width=3, dtype="uint8"):
        self.render_mode, self.form, self.steps = render_mode, (height, width, 3), 0
        self.dtype = dtype

    def step(self, action):
        self.steps += 1
        return super().step(action)

    def render(self):
        assert self.render_mode == "rgb_array"
        row, column, channel = numpy.indices(self.form)
        return (100 * channel + 10 * row + column + self.steps).astype(self.dtype)


class Unpainted(Painted):
    metadata = {"render_modes": ["human"]}


for kind in (Raises, Prints, Dies, Hangs, NotFinite, Grows, Busy, Image, Shifted, Painted,
             Unpainted):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind, disable_env_checker=True)
