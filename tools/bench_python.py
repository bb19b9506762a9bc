#!/usr/bin/python3
"""Training steps a second from Python, beside the C client and a local optimizer, in one run.

Usage: tools/bench_python.py [--build DIR] [--params 1e4 1e6] [--seconds 2] [--rounds 3] [--json]

Adam, one actor, journal on, thread for thread the same work in each way: a gradient is written,
a step is made from it, and the new weights are read (one float of every cache line).

  local    torch.optim.Adam: copy the gradient into .grad, step()
  c        gradq-bench: the C client, the gradient built in place
  client   gradq.Client: reserve(), copy, commit(), wait for the oldest, pull()
  torch    gradq.torch.RemoteOptimizer: copy the gradient into .grad, step(); with window 1 it waits
           for its step, as --max-staleness 0 asks

on lanes shm and inline, with windows 1 and 2.  The ways take turns, and medians of the rounds are
shown; `of_c` and `of_local` are ratios of those.
"""
import argparse
import collections
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "actors/python"))
try:
    import numpy
    import torch
    import gradq
    from gradq.torch import RemoteOptimizer
except ImportError as problem:
    sys.exit(f"bench_python: {sys.executable}: {problem}; type\n"
             "    sudo apt-get install --no-install-recommends python3-torch python3-numpy "
             "python3-zmq\nand use /usr/bin/python3, or run this with a Python that has them")

START_S, END_S = 30, 30
LINE = 16  # floats in a cache line
Way = collections.namedtuple("Way", "name lane window")
WAYS = [Way("local", "-", 1), *(Way(name, lane, window) for name in ("c", "client", "torch")
                                for lane in ("shm", "inline") for window in (1, 2))]


@contextlib.contextmanager
def service(build: Path, synchronous: bool):
    """Broker and optimizer of an empty run; the address."""
    with tempfile.TemporaryDirectory(prefix="gradq-bench-") as place:
        address = f"ipc://{place}/s"
        broker = [build / "gradq-broker", "--address", address]
        optimizer = [build / "gradq-optimizer", "--address", address, "--run", f"{place}/run",
                     "--optimizer", "adam", *(("--max-staleness", "0") if synchronous else ())]
        children = [subprocess.Popen([*map(str, argv), "--log-level", "error"],
                                     stdin=subprocess.DEVNULL) for argv in (broker, optimizer)]
        try:
            yield address
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait(END_S)


def rate(step, seconds: float) -> float:
    """Calls of step() a second, after a warm-up of a quarter of the time."""
    for share in (0.25, 1):
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < share * seconds or count < 4:
            step()
            count += 1
    return count / (now - begin)


def parameter_of(gradient: numpy.ndarray) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(gradient.size))
    parameter.grad = torch.zeros(gradient.size)
    return parameter


def torch_step(optimizer, parameter, gradient):
    """One step with this gradient, of either optimizer."""
    source, read = torch.from_numpy(gradient), parameter.detach().numpy()[::LINE]

    def step():
        parameter.grad.copy_(source)
        optimizer.step()
        read.sum()
    return step


def client_step(client, window: int, gradient):
    on_the_way = collections.deque()

    def step():
        client.reserve()[:] = gradient
        on_the_way.append(client.commit())
        if len(on_the_way) == window:
            client.wait(on_the_way.popleft())
        client.pull().base[::LINE].sum()
    return step


def c_rates(build: Path, params: int, seconds: float) -> dict:
    """{way: rate} of the C client."""
    argv = [build / "gradq-bench", "--params", params, "--actors", 1, "--window", 1, "--window", 2,
            "--lane", "shm", "--lane", "inline", "--seconds", seconds, "--json"]
    answer = subprocess.run([str(word) for word in argv], stdin=subprocess.DEVNULL, check=True,
                            stdout=subprocess.PIPE, text=True)
    rows = map(json.loads, answer.stdout.splitlines())
    return {Way("c", row["lane"], row["window"]): row["loop_per_s"] for row in rows}


def measure(build: Path, params: int, seconds: float) -> dict:
    """One round; {way: rate}."""
    gradient = numpy.random.default_rng(1).standard_normal(params, numpy.float32)
    rates = {}
    for way in WAYS:
        if way.name == "local":
            parameter = parameter_of(gradient)
            adam = torch.optim.Adam([parameter], 1e-3)
            rates[way] = rate(torch_step(adam, parameter, gradient), seconds)
        elif way.name == "c":
            if way not in rates:
                rates.update(c_rates(build, params, seconds))
        else:
            with service(build, synchronous=way.window == 1) as address:
                options = {"window": way.window, "lane": way.lane, "timeout": START_S}
                if way.name == "client":
                    first = {"w": numpy.zeros(params, numpy.float32)}
                    with gradq.Client(address, initial=first, **options) as client:
                        rates[way] = rate(client_step(client, way.window, gradient), seconds)
                else:
                    parameter = parameter_of(gradient)
                    with RemoteOptimizer([("w", parameter)], address, **options) as remote:
                        rates[way] = rate(torch_step(remote, parameter, gradient), seconds)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build", type=Path)
    parser.add_argument("--params", nargs="+", type=float, default=[1e4, 1e6], metavar="N")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="an object a row")
    options = parser.parse_args()
    if min(options.params) < 1 or options.rounds < 1 or options.seconds < 0.05:
        parser.error("--params and --rounds must be at least 1, --seconds at least 0.05")
    if not (options.build / "gradq-bench").exists():
        sys.exit(f"bench_python: no {options.build / 'gradq-bench'}; type make")
    torch.set_num_threads(1)
    for params in map(int, options.params):
        rounds = [measure(options.build, params, options.seconds) for _ in range(options.rounds)]
        median = {way: statistics.median(each[way] for each in rounds) for way in WAYS}
        if not options.json:
            print(f"{params:,} parameters; PyTorch {torch.__version__}, one thread; medians of "
                  f"{options.rounds}\n{'way':>8} {'lane':>8} {'window':>7} {'steps/s':>9} "
                  f"{'us/step':>9} {'of_c':>6} {'of_local':>9}")
        for way, found in median.items():
            of_c = found / median.get(way._replace(name="c"), float("nan"))
            of_local = found / median[WAYS[0]]
            if options.json:
                print(json.dumps({"params": params, **way._asdict(), "steps_per_s": found,
                                  "of_c": None if way.name == "local" else of_c,
                                  "of_local": of_local}))
            else:
                print(f"{way.name:>8} {way.lane:>8} {way.window:>7} {found:>9.1f} "
                      f"{1e6 / found:>9.0f} {of_c:>6.2f} {of_local:>9.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
