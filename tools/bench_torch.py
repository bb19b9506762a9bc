#!/usr/bin/python3
"""The pixel net of gradq-actor beside the same net in PyTorch: agent steps a second on one core.

Usage: tools/bench_torch.py [--build DIR] [--envs 1 4 8] [--seconds 2] [--rounds 3]
                            [--env gym:ALE/Pong-v5] [--json]

Both do the work of `gradq-actor --benchmark`: rollouts of 20 steps of K games on observations of
noise, each followed by the gradient; with --env also whole training steps of an Atari game, played
by the same bridge process behind the same pipes.  They take turns, one thread each, and the medians
of the rounds are shown.  PyTorch works in two ways, and the faster one of each round counts:

  keep    the graph of the rollout is kept while it is played, then differentiated
  again   played without a graph, then computed once more with all steps as one batch

Before anything is measured, both ways must give the gradients that gradq-actor gives.
"""
import argparse
import json
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import numpy
    import torch
    import torch.nn.functional as F
except ImportError as problem:
    sys.exit(f"bench_torch: {sys.executable}: {problem}; type\n"
             "    sudo apt-get install --no-install-recommends python3-torch python3-numpy\n"
             "and use /usr/bin/python3, or run this with a Python that has both")

ROOT = Path(__file__).resolve().parent.parent
STEPS, SIDE, FILTERS, HIDDEN, ACTIONS = 20, 42, 32, 256, 6
FEATURES = FILTERS * 3 * 3
ACTOR_TIMEOUT_S = 120  # beyond the measurements
# Of float32 sums in another order, relative to the largest derivative of a tensor.
TOLERANCE = 1e-4
LOSS = {"gamma": 0.99, "lambda": 1.0, "value_weight": 0.5, "entropy_weight": 0.01}
SHAPES = {"conv1.weight": (FILTERS, 1, 3, 3), "conv1.bias": (FILTERS,),
          **{f"conv{i}.{part}": (FILTERS, FILTERS, 3, 3) if part == "weight" else (FILTERS,)
             for i in (2, 3, 4) for part in ("weight", "bias")},
          "lstm.weight_ih": (4 * HIDDEN, FEATURES), "lstm.weight_hh": (4 * HIDDEN, HIDDEN),
          "lstm.bias_ih": (4 * HIDDEN,), "lstm.bias_hh": (4 * HIDDEN,),
          "pi.weight": (ACTIONS, HIDDEN), "pi.bias": (ACTIONS,),
          "v.weight": (1, HIDDEN), "v.bias": (1,)}


# ---- the net in PyTorch ---------------------------------------------------------------------

class Net(torch.nn.Module):
    def __init__(self, actions: int = ACTIONS):
        super().__init__()
        for i in range(4):
            setattr(self, f"conv{i + 1}",
                    torch.nn.Conv2d(FILTERS if i else 1, FILTERS, 3, stride=2, padding=1))
        self.lstm = torch.nn.LSTMCell(FEATURES, HIDDEN)
        self.pi = torch.nn.Linear(HIDDEN, actions)
        self.v = torch.nn.Linear(HIDDEN, 1)

    def features(self, x):
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.elu(conv(x))
        return x.flatten(1)

    def heads(self, h):
        return self.pi(h), self.v(h).squeeze(-1)

    def forward(self, x, state):
        state = self.lstm(self.features(x), state)
        return *self.heads(state[0]), state

    def rollout(self, observations, state, ends):
        """Logits (T, K, A) and values (T, K) of observations (T, K, 1, side, side) at once; ends
        (T, K): the state is zero after this step."""
        steps, games = observations.shape[:2]
        x = self.features(observations.flatten(0, 1)).view(steps, games, FEATURES)
        cell = self.lstm
        weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
        state, hidden, first = (state[0][None], state[1][None]), [], 0
        cuts = torch.nonzero(ends.any(1)).flatten().tolist()
        for last in cuts + ([] if cuts and cuts[-1] == steps - 1 else [steps - 1]):
            h, *state = torch.lstm(x[first:last + 1], state, weights, True, 1, 0.0, False, False,
                                   False)
            state = [s * (~ends[last])[None, :, None] for s in state]
            hidden.append(h)
            first = last + 1
        return self.heads(torch.cat(hidden))


def zero_state(games: int):
    return torch.zeros(games, HIDDEN), torch.zeros(games, HIDDEN)


def after(state, ends):
    return tuple(s * (~ends)[:, None] for s in state) if ends.any() else state


def play_keep(net, observe, steps, games):
    """Logits and values of a rollout with their graph; observe (t, logits) gives the observations
    of step t and which episodes ended before it."""
    state, logits, values = zero_state(games), [], []
    for t in range(steps):
        observation, ended = observe(t, logits[-1].detach() if logits else None)
        action_logits, value, state = net(observation, after(state, ended))
        logits.append(action_logits)
        values.append(value)
    return torch.stack(logits), torch.stack(values)


def play_again(net, observe, steps, games):
    """The same, played without a graph first."""
    state = first_state = zero_state(games)
    seen, ends, logits = [], [], None
    with torch.no_grad():
        for t in range(steps):
            observation, ended = observe(t, logits)
            state = after(state, ended)
            logits, _, state = net(observation, state)
            seen.append(observation)
            ends.append(ended)
    # rollout () wants to know what ended after a step.
    return net.rollout(torch.stack(seen), after(first_state, ends[0]),
                       torch.stack(ends[1:] + [torch.zeros(games, dtype=torch.bool)]))


WAYS = {"keep": play_keep, "again": play_again}


def a3c_loss(logits, values, actions, rewards, ends, beyond):
    """Mean of the loss of actors/a3c.h with lambda 1; all (T, K), beyond (K)."""
    returns, next_return = torch.empty_like(rewards), beyond
    for t in reversed(range(len(rewards))):
        next_return = rewards[t] + LOSS["gamma"] * next_return * ~ends[t]
        returns[t] = next_return
    logs = F.log_softmax(logits, -1)
    chosen = logs.gather(-1, actions[..., None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return (-chosen * (returns - values.detach()) + LOSS["value_weight"] * 0.5
            * (values - returns) ** 2 - LOSS["entropy_weight"] * entropy).mean()


# ---- are they the same? ---------------------------------------------------------------------

CODES = {"float32": "F32", "int32": "I32", "uint8": "U8"}


def write_safetensors(path: Path, tensors: dict, metadata: dict) -> None:
    head, offset = {"__metadata__": metadata}, 0
    for name, array in tensors.items():
        head[name] = {"dtype": CODES[str(array.dtype)], "shape": list(array.shape),
                      "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text
                     + b"".join(array.tobytes() for array in tensors.values()))


def read_safetensors(path: Path) -> dict:
    data = path.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    kinds = {"F32": numpy.float32, "F64": numpy.float64}
    return {name: numpy.frombuffer(data[8 + size:][slice(*entry["data_offsets"])],
                                   kinds[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in json.loads(data[8:8 + size]).items() if name != "__metadata__"}


def random_rollout(random) -> dict:
    """Weights of the usual sizes, and a rollout with the end of an episode in its middle."""
    tensors = {}
    for name, shape in SHAPES.items():
        fan = math.prod(shape[1:]) if len(shape) > 1 else 100
        tensors[name] = random.normal(0, 1 / math.sqrt(fan), shape)
    tensors["obs"] = random.random((STEPS, 1, SIDE, SIDE))
    tensors["rewards"] = random.normal(0, 1, STEPS)
    tensors["bootstrap"] = random.normal(0, 1, 1)
    tensors = {name: array.astype(numpy.float32) for name, array in tensors.items()}
    tensors["actions"] = random.integers(0, ACTIONS, STEPS, dtype=numpy.int32)
    tensors["done"] = numpy.zeros(STEPS, numpy.uint8)
    tensors["done"][7] = 1
    return tensors


def torch_gradients(way: str, tensors: dict) -> dict:
    net = Net()
    parts = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    net.load_state_dict({name: parts[name] for name in SHAPES})
    done = parts["done"].bool()[:, None]
    before = torch.cat([torch.zeros(1, 1, dtype=torch.bool), done[:-1]])
    logits, values = WAYS[way](net, lambda t, _: (parts["obs"][t:t + 1], before[t]), STEPS, 1)
    a3c_loss(logits, values, parts["actions"].long()[:, None], parts["rewards"][:, None], done,
             parts["bootstrap"]).backward()
    return {name: parameter.grad.numpy() for name, parameter in net.named_parameters()}


def check_equal(actor: Path) -> float:
    """The largest difference found; an exit when it is above the tolerance."""
    tensors = random_rollout(numpy.random.default_rng(1))
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        write_safetensors(given, tensors,
                          {**{k: str(v) for k, v in LOSS.items()}, "reduction": "mean"})
        call([actor, "--gradients", "--net", "conv-lstm", "--in", given, "--out", out], 0)
        ours = read_safetensors(out)
    worst = 0.0
    for way in WAYS:
        for name, theirs in torch_gradients(way, tensors).items():
            most = float(numpy.abs(theirs).max())
            differs = float(numpy.abs(ours[f"grad.{name}"] - theirs).max()) / max(most, 1e-30)
            if not differs <= TOLERANCE:
                sys.exit(f"bench_torch: gradients of {name} differ by {differs:.2g} of the largest "
                         f"(way '{way}'): these are not the same net, and no figures are shown")
            worst = max(worst, differs)
    return worst


# ---- games ----------------------------------------------------------------------------------

def reduction():
    """(42, 160): each axis of gq_screen_reduce as a matrix."""
    matrix = numpy.zeros((SIDE, 160), numpy.float32)
    for i in range(SIDE):
        place = (i + 0.5) * 80 / SIDE - 0.5
        left, right = int(place), place - int(place)
        matrix[i, 2 * left:2 * left + 4] = [0.5 - right / 2] * 2 + [right / 2] * 2
    return matrix


class Games:
    """K Atari games behind the bridge process that gradq-actor itself uses."""

    def __init__(self, python: str, name: str, count: int):
        text = (ROOT / "actors/python/gym_bridge.py").read_text()
        self.count, self.matrix = count, reduction()
        self.child = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2', "sh", python, "-u", "-c", text,
             name, str(count), "none"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _, self.actions, form, _ = struct.unpack_from("=IIII", self.answer())
        if form != 3:
            sys.exit(f"bench_torch: {name} is no Atari game with its usual screen")
        self.screens = numpy.zeros((count, 160, 160), numpy.uint8)
        for k in range(count):
            self.reset(k, 1, k + 1)

    def answer(self) -> bytes:
        head = self.child.stdout.read(8)
        kind, size = struct.unpack("=II", head) if len(head) == 8 else (3, 0)
        body = self.child.stdout.read(size)
        if kind not in (1, 2):
            sys.exit(f"bench_torch: {body.decode() or 'the bridge has ended'}")
        return body

    def request(self, *words, actions=()) -> bytes:
        self.child.stdin.write(struct.pack("=IIIIQ", *words)
                               + struct.pack(f"={len(actions)}I", *actions))
        self.child.stdin.flush()
        return self.answer()

    def reset(self, k: int, seeded: int = 0, seed: int = 0) -> None:
        body = self.request(1, k, seeded, 0, seed)
        self.screens[k] = numpy.frombuffer(body, numpy.uint8, offset=16).reshape(160, 160)

    def step(self, actions):
        """Rewards and ends; the games that ended begin anew."""
        states = numpy.frombuffer(self.request(2, 0, 0, 0, 0, actions=actions), numpy.uint8)
        states = states.reshape(self.count, 16 + 160 * 160)
        rewards = states[:, :8].copy().view(numpy.float64)[:, 0]
        ends = states[:, 8:16].any(1)
        self.screens[:] = states[:, 16:].reshape(self.count, 160, 160)
        for k in numpy.nonzero(ends)[0]:
            self.reset(int(k))
        return torch.from_numpy(rewards.astype(numpy.float32)), torch.from_numpy(ends)

    def observations(self):
        reduced = self.matrix @ self.screens.astype(numpy.float32) @ self.matrix.T / 255
        return torch.from_numpy(reduced[:, None])

    def close(self) -> None:
        self.child.stdin.close()
        self.child.wait(10)


# ---- measuring ------------------------------------------------------------------------------

def call(command: list, seconds: float) -> str:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True,
                          timeout=seconds + ACTOR_TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"bench_torch: {' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def rate(rollout, games: int, seconds: float) -> float:
    """Agent steps a second, after one rollout of warming up."""
    rollout()
    steps, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        rollout()
        steps += STEPS * games
    return steps / (now - begin)


def net_rollout(way: str, games: int):
    net, noise = Net(), torch.rand(games, 1, SIDE, SIDE)
    none = torch.zeros(games, dtype=torch.bool)

    def rollout():
        net.zero_grad(set_to_none=True)
        logits, values = WAYS[way](net, lambda t, _: (noise, none), STEPS, games)
        # Any derivatives cost the same: the outputs serve.
        torch.autograd.backward([logits, values], [logits.detach(), values.detach()])
    return rollout


def training_rollout(way: str, games: Games):
    net = Net(games.actions)
    none = torch.zeros(games.count, dtype=torch.bool)

    def rollout():
        net.zero_grad(set_to_none=True)
        actions, rewards, ends = [], [], []

        def act(logits):
            actions.append(torch.multinomial(F.softmax(logits, -1), 1)[:, 0])
            reward, ended = games.step(actions[-1].tolist())
            rewards.append(reward)
            ends.append(ended)

        def observe(t, logits):
            if t > 0:
                act(logits)
            return games.observations(), ends[-1] if ends else none

        logits, values = WAYS[way](net, observe, STEPS, games.count)
        act(logits[-1].detach())
        with torch.no_grad():  # the value beyond, of the state as good as any other for the cost
            beyond = net(games.observations(), zero_state(games.count))[1]
        a3c_loss(logits, values, torch.stack(actions), torch.stack(rewards), torch.stack(ends),
                 beyond).backward()
    return rollout


def measure(options, actor: Path, games: int) -> dict:
    """One round: gradq-actor, then PyTorch; {what: (ours, theirs, way)}."""
    env = options.env or "Pong"
    ours = json.loads(call([actor, "--benchmark", options.seconds, "--env", env, "--net",
                            "conv-lstm", "--rollout", STEPS, "--envs-per-actor", games, "--json"],
                           3 * options.seconds))
    kinds = {"net": (ours["net_per_s"], lambda way: net_rollout(way, games))}
    played = None
    if options.env:
        played = Games(options.python, options.env.removeprefix("gym:"), games)
        kinds["both"] = (ours["both_per_s"], lambda way: training_rollout(way, played))
    found = {}
    for kind, (our_rate, make) in kinds.items():
        rates = {way: rate(make(way), games, options.seconds) for way in WAYS}
        way = max(rates, key=rates.get)
        found[kind] = our_rate, rates[way], way
    if played:
        played.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=Path)
    parser.add_argument("--envs", nargs="+", type=int, default=[1, 4, 8], metavar="K")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env", help="gym:ALE/NAME: also training of this Atari game")
    parser.add_argument("--python", default=str(ROOT / "build/venv/bin/python"),
                        help="interpreter with gymnasium and ale-py, for --env")
    parser.add_argument("--json", action="store_true", help="an object a row")
    options = parser.parse_args()
    if options.env and not options.env.startswith("gym:ALE/"):
        parser.error("--env takes gym:ALE/NAME; the built-in games are C and have no Python side")
    if min(options.envs) < 1 or options.rounds < 1 or options.seconds <= 0:
        parser.error("--envs, --rounds and --seconds must be above 0")
    actor = options.build / "gradq-actor"
    if not actor.exists():
        sys.exit(f"bench_torch: no {actor}; type make")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    worst = check_equal(actor)
    if not options.json:
        print(f"the same gradients to {worst:.1g} of the largest; PyTorch {torch.__version__}; "
              f"agent steps/s on one core, medians of {options.rounds}")
        print(f"{'what':>6} {'games':>6} {'gradq':>9} {'PyTorch':>9} {'ratio':>6}  way")
    for games in options.envs:
        rounds = [measure(options, actor, games) for _ in range(options.rounds)]
        for kind in rounds[0]:
            ours, theirs = (statistics.median(r[kind][i] for r in rounds) for i in (0, 1))
            way = statistics.mode(r[kind][2] for r in rounds)
            if options.json:
                print(json.dumps({"what": kind, "envs": games, "gradq_per_s": round(ours, 1),
                                  "torch_per_s": round(theirs, 1), "ratio": ours / theirs,
                                  "way": way, "difference": worst, "torch": torch.__version__}))
            else:
                print(f"{kind:>6} {games:>6} {ours:>9.0f} {theirs:>9.0f} {ours / theirs:>6.2f}  "
                      f"{way}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
