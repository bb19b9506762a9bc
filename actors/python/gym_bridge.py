"""The Gymnasium environments of one actor behind two pipes.  Step 0 of a gradient's path.

Run by actors/gym.c, which holds this text inside the program:
    python -c TEXT ID COUNT pictures|none [KEY=VALUE ...]
Requests come in on descriptor 3, answers go out on descriptor 4; integers and floats are the
host's own.  It must never write to descriptor 4 outside answer(): whatever an environment prints
goes to stderr.

request  u32 kind, u32 index, u32 seeded, u32 unused, u64 seed
         RESET: of game `index`; STEP: of all, u32 action[COUNT] follows; PICTURE: of game `index`
answer   u32 kind, u32 bytes, then the body
         SPEC: u32 rank, u32 actions, u32 format, u32 unused, u64 shape[rank]
         STATE, of the game that was reset or of each: f64 reward, u32 terminated, u32 truncated,
             observation
         PICTURE: u32 height, u32 width, u8[height, width, 3]
         WRONG (the configuration), FAILED (anything else): UTF-8 text
An observation is, by format, FLOAT: f32[product of shape]; PLANES: u8[shape]; PIXELS: u8[height,
width, channels] for a shape of channels, height, width; ATARI: u8[160, 160], the field of a grey
Atari screen, which the actor reduces to the shape, 1 x 42 x 42.

Atari games (ALE/...) come in format ATARI, unless obs_type=... asks for another view; with
terminal_on_life_loss=true a lost life ends an episode, and the game goes on in the next.
"""

import json
import os
import signal
import struct
import sys

RESET, STEP, PICTURE = 1, 2, 3
SPEC, STATE, WRONG, FAILED, SEEN = 1, 2, 3, 4, 5
FLOAT, PLANES, PIXELS, ATARI = range(4)
REQUEST = struct.Struct("=IIIIQ")
ANSWER = struct.Struct("=II")
OUTCOME = struct.Struct("=dII")
TEXT_BYTES_MAX = 900  # what fits one error message of the actor
RANK_MAX = 8
IOV_MAX = 1024  # parts of one write
FIELD = slice(34, 194)  # rows of an Atari screen that a game is played on; scores are above


class Wrong(Exception):
    """The user must change a setting or install something."""


def answer(kind, *parts):
    """The parts of a body, as they lie in memory: screens are not copied once more."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    views.insert(0, memoryview(ANSWER.pack(kind, sum(view.nbytes for view in views))))
    while views:
        sent = os.writev(4, views[:IOV_MAX])
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0][sent:]


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


class Game:
    """One environment; a lost life may end its episodes."""

    def __init__(self, env, by_life):
        self.env, self.by_life = env, by_life
        self.lives = 0
        self.over = True

    def reset(self, seed):
        if seed is not None or self.over or not self.by_life:
            observation, information = self.env.reset(seed=seed)
            self.over = False
        else:  # a life was lost: the game goes on, with a step of the first action (no-op)
            observation, _, ended, cut, information = self.env.step(0)
            if ended or cut:
                observation, information = self.env.reset()
        self.lives = information.get("lives", 0)
        return observation

    def step(self, action):
        observation, reward, terminated, truncated, information = self.env.step(action)
        self.over = terminated or truncated
        if self.by_life:
            lives = information.get("lives", 0)
            terminated, self.lives = terminated or lives < self.lives, lives
        return observation, OUTCOME.pack(float(reward), bool(terminated), bool(truncated))


def make(name, count, pictures, words):
    """gymnasium, [Game], whether their screens are to be reduced."""
    arguments = keywords(words)
    if pictures:
        arguments["render_mode"] = "rgb_array"
    try:
        import gymnasium
    except ImportError as problem:
        raise Wrong(
            f"{sys.executable} cannot import gymnasium ({problem}): `make venv` makes a Python "
            f"with it that is found by itself; or install it there (pip install gymnasium, "
            f"for Atari ale-py, too), or name another interpreter with --python"
        ) from problem
    atari, by_life = name.startswith("ALE/"), False
    if atari:
        try:
            import ale_py
        except ImportError as problem:
            raise Wrong(
                f"{sys.executable} cannot import ale_py ({problem}), which {name} needs: "
                f"install it there (pip install ale-py)"
            ) from problem
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        gymnasium.register_envs(ale_py)
        by_life = arguments.pop("terminal_on_life_loss", False)
        if not isinstance(by_life, bool):
            raise Wrong("--env-set terminal_on_life_loss: true or false is needed")
    atari = atari and "obs_type" not in arguments
    if atari:
        arguments["obs_type"] = "grayscale"
    # Gymnasium's checker costs a fifth of an emulator's step, and sizes are checked here anyway.
    arguments.setdefault("disable_env_checker", True)
    try:
        games = [Game(gymnasium.make(name, **arguments), by_life) for _ in range(count)]
    except Exception as problem:  # unknown id, missing package, wrong keyword, constructor's own
        hint = "; --record needs its render_mode=rgb_array" if pictures else ""
        raise Wrong(
            f"gymnasium.make('{name}') failed: {type(problem).__name__}: {problem}{hint}"
        ) from problem
    modes = games[0].env.metadata.get("render_modes", [])
    if pictures and "rgb_array" not in modes:
        raise Wrong(f"there are no pictures to record: its render modes are {modes}")
    return gymnasium, games, atari


def layout(gymnasium, env, atari):
    """Format, shape that the net sees, function from an observation to its bytes, first action,
    action count."""
    import numpy

    box, actions = env.observation_space, env.action_space
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise Wrong(f"the action space {actions} is not supported: gradq needs Discrete actions")
    if not isinstance(box, gymnasium.spaces.Box) or 0 in box.shape:
        raise Wrong(f"the observation space {box} is not supported: gradq needs a Box")
    choices = int(actions.start), int(actions.n)
    if atari and box.shape == (210, 160):
        return ATARI, (1, 42, 42), lambda x: x[FIELD].data, *choices
    if box.dtype != numpy.uint8 or len(box.shape) not in (2, 3):
        # Vectors, and everything else as one.
        shape = (int(numpy.prod(box.shape, dtype=numpy.int64)),)
        return FLOAT, shape, lambda x: numpy.ascontiguousarray(x, numpy.float32).data, *choices
    # Images: channels first for the net.  They come as height x width, height x width x channels,
    # or channels first already, as stacked frames do.
    if len(box.shape) == 2:
        form, shape = PLANES, (1, *box.shape)
    elif box.shape[2] in (1, 3, 4):
        form, shape = PIXELS, (box.shape[2], box.shape[0], box.shape[1])
    else:
        form, shape = PLANES, box.shape
    return form, shape, lambda x: numpy.ascontiguousarray(x, numpy.uint8).data, *choices


def picture(env):
    """Parts of the answer with what the environment shows."""
    import numpy

    rgb = numpy.asarray(env.render())
    if rgb.dtype != numpy.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3:
        raise ValueError(f"render() gave {rgb.dtype}{list(rgb.shape)}, not uint8[height, width, 3]")
    return struct.pack("=II", *rgb.shape[:2]), numpy.ascontiguousarray(rgb).data


def read(size):
    """Bytes of a request, or None when the actor has gone."""
    data = b""
    while len(data) < size:
        part = os.read(3, size - len(data))
        if not part:
            return None
        data += part
    return data


def serve(games, convert, start):
    still, actions = OUTCOME.pack(0, 0, 0), struct.Struct(f"={len(games)}I")
    while (request := read(REQUEST.size)) is not None:
        kind, index, seeded, _, seed = REQUEST.unpack(request)
        if kind == RESET:
            # Some environments take 31 bits of seed only.
            observation = games[index].reset(seed % 2**31 if seeded else None)
            answer(STATE, still, convert(observation))
        elif kind == STEP:
            chosen = read(actions.size)
            if chosen is None:
                return
            parts = []
            for game, action in zip(games, actions.unpack(chosen), strict=True):
                observation, outcome = game.step(start + action)
                parts += outcome, convert(observation)
            answer(STATE, *parts)
        elif kind == PICTURE:
            answer(SEEN, *picture(games[index].env))
        else:
            raise ValueError(f"request {kind} is not one of the protocol")


def main():
    # The actor decides when to stop: a Ctrl-C for the whole process group must not tear the pipe
    # before it has closed the environment.  When the actor is gone, read_request ends the loop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    games = []
    try:
        gymnasium, games, atari = make(
            sys.argv[1], int(sys.argv[2]), sys.argv[3] == "pictures", sys.argv[4:]
        )
        form, shape, convert, start, count = layout(gymnasium, games[0].env, atari)
        if len(shape) > RANK_MAX:
            raise Wrong(f"an observation of {len(shape)} dimensions is not supported")
        answer(SPEC, struct.pack(f"=IIII{len(shape)}Q", len(shape), count, form, 0, *shape))
        serve(games, convert, start)
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
    for game in games:
        game.env.close()


main()
