"""One Gymnasium environment behind two pipes.  Step 0 of a gradient's path.

Run by actors/gym.c, which holds this text inside the program:  python -c TEXT ID [KEY=VALUE ...]
Requests come in on descriptor 3, answers go out on descriptor 4; integers and floats are the
host's own.  It must never write to descriptor 4 outside answer(): whatever an environment prints
goes to stderr.

request  u32 kind, u32 argument, u64 seed
         RESET: argument 1 when the seed is meant, else 0; STEP: argument is the action
answer   u32 kind, u32 bytes, then the body
         SPEC: u32 rank, u32 actions, u64 shape[rank]
         STATE: f64 reward, u32 terminated, u32 truncated, f32 observation[product of shape]
         WRONG (the configuration), FAILED (anything else): UTF-8 text
"""

import json
import os
import signal
import struct
import sys

RESET, STEP = 1, 2
SPEC, STATE, WRONG, FAILED = 1, 2, 3, 4
REQUEST = struct.Struct("=IIQ")
ANSWER = struct.Struct("=II")
OUTCOME = struct.Struct("=dII")
TEXT_BYTES_MAX = 900  # what fits one error message of the actor
RANK_MAX = 8


class Wrong(Exception):
    """The user must change a setting or install something."""


def answer(kind, body):
    data = ANSWER.pack(kind, len(body)) + body
    while data:
        data = data[os.write(4, data) :]


def keywords(words):
    """KEY=VALUE words as a dict: VALUE as JSON where it is JSON, else as the text it is."""
    result = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise Wrong(f"--env-set {word}: write KEY=VALUE")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def make(name, words):
    arguments = keywords(words)
    try:
        import gymnasium
    except ImportError as problem:
        raise Wrong(
            f"{sys.executable} cannot import gymnasium ({problem}): install it there "
            f"(pip install gymnasium), or name another interpreter with --python"
        ) from problem
    if name.startswith("ALE/"):
        try:
            import ale_py
        except ImportError as problem:
            raise Wrong(
                f"{sys.executable} cannot import ale_py ({problem}), which {name} needs: "
                f"install it there (pip install ale-py)"
            ) from problem
        gymnasium.register_envs(ale_py)
    try:
        return gymnasium, gymnasium.make(name, **arguments)
    except Exception as problem:  # unknown id, missing package, wrong keyword, constructor's own
        raise Wrong(
            f"gymnasium.make('{name}') failed: {type(problem).__name__}: {problem}"
        ) from problem


def layout(gymnasium, env):
    """Shape that the net sees, function from an observation to it, first action, action count."""
    import numpy

    box, actions = env.observation_space, env.action_space
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise Wrong(f"the action space {actions} is not supported: gradq needs Discrete actions")
    if not isinstance(box, gymnasium.spaces.Box) or 0 in box.shape:
        raise Wrong(f"the observation space {box} is not supported: gradq needs a Box")
    if box.dtype != numpy.uint8 or len(box.shape) not in (2, 3):
        # Vectors, and everything else as one.
        shape = (int(numpy.prod(box.shape, dtype=numpy.int64)),)
        return shape, lambda x: numpy.asarray(x, numpy.float32), int(actions.start), int(actions.n)
    # Images: channels first, 0 .. 1.  Height x width, height x width x channels, or channels first
    # already, as stacked frames come.
    if len(box.shape) == 2:
        shape, order = (1, *box.shape), None
    elif box.shape[2] in (1, 3, 4):
        shape, order = (box.shape[2], box.shape[0], box.shape[1]), (2, 0, 1)
    else:
        shape, order = box.shape, None
    scale = numpy.float32(255)

    def image(x):
        x = numpy.asarray(x)
        if order is not None:
            x = x.transpose(order)
        return x.astype(numpy.float32, order="C") / scale

    return shape, image, int(actions.start), int(actions.n)


def read_request():
    """The next request, or None when the actor has gone."""
    data = b""
    while len(data) < REQUEST.size:
        part = os.read(3, REQUEST.size - len(data))
        if not part:
            return None
        data += part
    return REQUEST.unpack(data)


def serve(env, convert, start):
    while (request := read_request()) is not None:
        kind, argument, seed = request
        if kind == RESET:
            # Some environments take 31 bits of seed only.
            observation, _ = env.reset(seed=seed % 2**31 if argument else None)
            outcome = OUTCOME.pack(0, 0, 0)
        elif kind == STEP:
            observation, reward, terminated, truncated, _ = env.step(start + argument)
            outcome = OUTCOME.pack(float(reward), bool(terminated), bool(truncated))
        else:
            raise ValueError(f"request {kind} is not one of the protocol")
        answer(STATE, outcome + convert(observation).tobytes())


def main():
    # The actor decides when to stop: a Ctrl-C for the whole process group must not tear the pipe
    # before it has closed the environment.  When the actor is gone, read_request ends the loop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    env = None
    try:
        gymnasium, env = make(sys.argv[1], sys.argv[2:])
        shape, convert, start, count = layout(gymnasium, env)
        if len(shape) > RANK_MAX:
            raise Wrong(f"an observation of {len(shape)} dimensions is not supported")
        answer(SPEC, struct.pack(f"=II{len(shape)}Q", len(shape), count, *shape))
        serve(env, convert, start)
    except BrokenPipeError:
        pass
    except Exception as problem:
        if isinstance(problem, Wrong):
            kind, text = WRONG, str(problem)
        else:
            import traceback

            traceback.print_exc()
            place = traceback.extract_tb(problem.__traceback__)[-1]
            kind = FAILED
            text = f"{type(problem).__name__}: {problem} ({place.filename}:{place.lineno})"
        try:
            answer(kind, text.encode("utf-8", "replace")[:TEXT_BYTES_MAX])
        except BrokenPipeError:
            pass
    if env is not None:
        env.close()


main()
