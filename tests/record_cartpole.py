#!/usr/bin/env python3
"""Record episodes of Gymnasium's CartPole-v1 for tests/test_cartpole.c.

    build/venv/bin/python tests/record_cartpole.py tests/data/cartpole/episodes.safetensors

Four hand policies, so that the recording has falls to both sides, both edges of the track, and the
time limit.  Tensors, E episodes and N steps of all of them in a row:

    seed (E) i64       what reset was seeded with
    start (E, 4) f64   state after reset
    length (E) i32     steps of the episode
    actions (N) i32    observations (N, 4) f32    states (N, 4) f64: after the action
    rewards (N) f32    terminated (N) u8          truncated (N) u8
"""

import json
import struct
import sys

import gymnasium
import numpy

EPISODES = 12  # three of each policy


def balance(x, x_dot, theta, theta_dot):
    """Holds the pole for ever: lean towards the middle of the track."""
    return int(theta + 0.5 * theta_dot + 0.02 * x + 0.1 * x_dot > 0)


def drift(sign):
    """Holds the pole, lets the cart run off the track on one side."""

    def policy(x, x_dot, theta, theta_dot):
        return int(theta - sign * 0.1 + 0.5 * theta_dot > 0)

    return policy


def main():
    generator = numpy.random.default_rng(1)
    policies = [balance, drift(1), drift(-1), lambda *state: int(generator.integers(2))]
    kinds = {
        "seed": "i8",
        "start": "f8",
        "length": "i4",
        "actions": "i4",
        "observations": "f4",
        "states": "f8",
        "rewards": "f4",
        "terminated": "u1",
        "truncated": "u1",
    }
    rows = {name: [] for name in kinds}
    env = gymnasium.make("CartPole-v1")
    for episode in range(EPISODES):
        policy = policies[episode % len(policies)]
        env.reset(seed=episode)
        state = env.unwrapped.state
        rows["seed"].append(episode)
        rows["start"].append(state)
        steps, over = 0, False
        while not over:
            action = policy(*state)
            observation, reward, terminated, truncated, _ = env.step(action)
            state = env.unwrapped.state
            steps, over = steps + 1, terminated or truncated
            for name, value in (
                ("actions", action),
                ("observations", observation),
                ("states", state),
                ("rewards", reward),
                ("terminated", terminated),
                ("truncated", truncated),
            ):
                rows[name].append(value)
        rows["length"].append(steps)
        print(f"episode {episode}: {steps} steps, terminated {terminated}, x {state[0]:.2f}")
    write(sys.argv[1], {name: numpy.array(rows[name], kind) for name, kind in kinds.items()})


def write(path, arrays):
    """The safetensors format, without the package: length of the header, header, data."""
    names = {"i8": "I64", "f8": "F64", "i4": "I32", "f4": "F32", "u1": "U8"}
    header = {"__metadata__": {"gymnasium": gymnasium.__version__, "numpy": numpy.__version__}}
    data = b""
    for name, array in arrays.items():
        begin, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": names[array.dtype.str[1:]],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


main()
