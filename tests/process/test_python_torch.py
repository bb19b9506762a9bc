"""gradq.torch.RemoteOptimizer steps as torch.optim does, and the examples train under the
supervisor, beside actors in C."""
import contextlib
import copy
import json
import math
import os
import pickle
import random
import re
import signal
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pytest

from conftest import BUILD, NEEDS_TORCH, ROOT, SLOW, wait_for
from peer import service  # noqa: F401

PACKAGE = ROOT / "actors/python"
PYTHON = {"PYTHONPATH": str(PACKAGE), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
EXAMPLES = PACKAGE / "examples"
SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))
sys.path.insert(0, str(PACKAGE))
import gradq  # noqa: E402

try:
    import torch
    from gradq.torch import RemoteOptimizer
except ImportError:
    torch = None
pytestmark = NEEDS_TORCH


@pytest.fixture
def with_gymnasium() -> str:
    """A Python that has torch and Gymnasium."""
    python = ROOT / "build/venv-torch/bin/python"
    if not python.exists():
        reason = f"{python} is missing; type tools/setup.sh torch"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return str(python)


def net(seed: int = 1) -> "torch.nn.Module":
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def optimizer(service, model, **settings) -> "RemoteOptimizer":  # noqa: F811
    return RemoteOptimizer(model.named_parameters(), service.address,
                           **{"timeout": 20 * SLOW, **settings})


def vector(model) -> numpy.ndarray:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy()


RULES = {
    "sgd": (("sgd", "lr=0.25"), lambda p: torch.optim.SGD(p, 0.25)),
    "momentum": (("sgd", "lr=0.25", "momentum=0.9"), lambda p: torch.optim.SGD(p, 0.25, 0.9)),
    "adam": (("adam", "lr=0.01"), lambda p: torch.optim.Adam(p, 0.01))}


@pytest.mark.parametrize("rule", RULES)
def test_each_step_is_that_of_torch(service, rule):  # noqa: F811
    """Differences are of float32 rounding: at most a few units in the last place, which grow with
    the steps."""
    (name, *settings), local = RULES[rule]
    service.up("--optimizer", name, *(word for each in settings for word in ("--set", each)),
               "--max-staleness", "0")
    model = net()
    twin = copy.deepcopy(model)
    theirs = local(twin.parameters())
    with optimizer(service, model) as ours:
        assert ours.synchronous
        for step in range(1, 31):
            x = torch.randn(16, 4)
            norms = []
            for each, stepper in ((model, ours), (twin, theirs)):
                stepper.zero_grad()
                (each(x) ** 2).mean().backward()
                norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1))
                stepper.step()
            assert norms[0] > 0.1 or step > 1, "it is clipped at first"
            assert ours.version == step and ours.staleness == 0
            numpy.testing.assert_allclose(vector(model), vector(twin), rtol=1e-5, atol=1e-6)
        assert ours.refused == {}
    service.ends_with(30)


def test_200_scheduled_and_clipped_steps_of_adam_are_those_of_torch(service):  # noqa: F811
    """Warm-up and cosine are the run's, clip_grad_norm_ the actor's.  Both sides round to float32
    in 200 steps, in another order (a product by 1 / sqrt (1 - beta2^t) here, a division there), so
    the weights drift apart as a random walk does: about one unit of the largest weight's last place
    (root mean square), six at the worst of 1,738.  The same in float64 shows that PyTorch itself is
    twice as far from exact arithmetic, and gradq as far as PyTorch."""
    warmup, total, bound, units = 20, 250, 0.3, {}
    service.up("--optimizer", "adam", "--max-staleness", "0", *(
        word for each in ("lr=0.01", "schedule=cosine", f"warmup_steps={warmup}",
                          f"schedule_steps={total}") for word in ("--set", each)))

    def factor(done: int) -> float:
        left = (done - warmup) / (total - warmup)
        return (done + 1) / warmup if done < warmup else (1 + math.cos(math.pi * left)) / 2
    torch.manual_seed(SEED)
    print(f"SEED={SEED}")
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    theirs = [torch.optim.Adam(each.parameters(), 0.01) for each in (twin, exact)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in theirs]
    clipped, begin = 0, vector(model)
    with optimizer(service, model, window=1) as ours:
        for step in range(1, 201):
            x, y = torch.randn(32, 16), torch.randint(0, 10, (32,))
            for each, stepper in ((model, ours), (twin, theirs[0]), (exact, theirs[1])):
                stepper.zero_grad()
                out = each(x.to(each[0].weight.dtype))
                torch.nn.functional.cross_entropy(out, y).backward()
                clipped += torch.nn.utils.clip_grad_norm_(each.parameters(), bound) > bound
                stepper.step()
            for each in schedules:
                each.step()
            assert ours.version == step
            if step in (1, 200):
                here, there, best = vector(model), vector(twin), vector(exact)
                unit = numpy.spacing(abs(there).max())
                units[step] = {name: numpy.array([abs(a - b).max(), ((a - b) ** 2).mean() ** 0.5])
                               / unit for name, a, b in (("torch", here, there),
                                                         ("exact", here, best),
                                                         ("torch from exact", there, best))}
        assert ours.refused == {}
    print(f"units of the largest weight's last place, [most, root mean square]: {units}")
    assert clipped > 300 and abs(vector(model) - begin).max() > 0.1, "there was something to do"
    assert units[1]["torch"][0] <= 1
    apart = units[200]["torch from exact"][1]
    assert units[200]["torch"][1] < apart and units[200]["torch"][0] < 16
    assert units[200]["exact"][1] < 1.25 * apart


def test_closures_and_parameters_without_gradients(service):  # noqa: F811
    service.up("--set", "lr=1", "--optimizer", "sgd", "--max-staleness", "0")
    model = net()
    before = vector(model)
    with optimizer(service, model) as ours:
        def closure():
            ours.zero_grad()
            loss = model[2].bias.sum()
            loss.backward()
            return loss
        expected = float(model[2].bias.sum())
        assert float(ours.step(closure)) == pytest.approx(expected)
        assert (before - vector(model)).tolist() == [0] * 56 + [pytest.approx(1)] * 2
        ours.zero_grad(set_to_none=True)
        ours.step()
        assert ours.version == 2
        assert (before - vector(model)).tolist() == [0] * 56 + [pytest.approx(1)] * 2


def test_all_actors_begin_with_the_first_one_s_weights(service):  # noqa: F811
    service.up()
    first, second = net(1), net(2)
    assert (vector(first) != vector(second)).any()
    with optimizer(service, first), optimizer(service, second):
        assert vector(second).tobytes() == vector(first).tobytes() == vector(net(1)).tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_parameters_of_other_types_travel_as_float32(service, dtype):  # noqa: F811
    service.up("--max-staleness", "0")
    model = torch.nn.ParameterList([torch.nn.Parameter(
        torch.tensor([1.0, 2.0, 3.0], dtype=getattr(torch, dtype)))])
    with optimizer(service, model) as ours:
        model[0].grad = torch.full_like(model[0], 0.5)
        ours.step()
        assert model[0].dtype == getattr(torch, dtype) and model[0].tolist() == [0.5, 1.5, 2.5]


def test_staleness_counts_the_steps_of_others(service):  # noqa: F811
    service.up()
    with optimizer(service, net()) as late, optimizer(service, net()) as busy:
        for _ in range(3):
            busy.step()
            busy.client.wait()
            busy.pull()
        assert busy.version == 3 and busy.staleness == 0 and not busy.synchronous
        late.step()
        late.client.wait()
        assert late.staleness == 3 and late.pull() == 4


def test_a_learning_rate_that_is_set_here_warns_once_and_changes_nothing(service):  # noqa: F811
    service.up("--max-staleness", "0")  # sgd, learning rate 1
    model = net()
    with optimizer(service, model) as ours:
        schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
        before = vector(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                for each in model.parameters():
                    each.grad = torch.ones_like(each)
                ours.step()
                schedule.step()
        assert [str(each.message) for each in said if "no effect" in str(each.message)] != []
        assert len([each for each in said if "no effect" in str(each.message)]) == 1
        numpy.testing.assert_allclose(before - vector(model), 3, rtol=1e-5)


def test_state_says_what_is_installed_and_fits_its_own_parameters_only(service):  # noqa: F811
    service.up("--max-staleness", "0")
    model = net()
    with optimizer(service, model) as ours:
        ours.step()
        state = copy.deepcopy(ours.state_dict())
        assert state["gradq"]["version"] == 1 and state["gradq"]["names"][0] == "0.weight"
        torch.save(state, service.directory / "state.pt")
        with torch.no_grad():
            model[0].weight.zero_()
        ours.load_state_dict(torch.load(service.directory / "state.pt"))
        assert model[0].weight.abs().sum() > 0, "the run's weights are installed again"
        for other in (torch.optim.SGD(model.parameters(), 1).state_dict(),
                      {**state, "gradq": {"names": ["0.weight"]}}):
            with pytest.raises(gradq.LayoutMismatch, match="other parameters"):
                ours.load_state_dict(other)
        with pytest.raises(gradq.LayoutMismatch, match="settled"):
            ours.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        with pytest.raises(TypeError, match="sockets"):
            pickle.dumps(ours)


def test_what_cannot_be_parameters_is_said(monkeypatch):
    monkeypatch.delenv("GRADQ_ADDRESS", raising=False)
    with pytest.raises(TypeError, match=r"named_parameters\(\)"):
        RemoteOptimizer(net().parameters(), "ipc:///tmp/x")
    with pytest.raises(gradq.LayoutMismatch, match="int64"):
        RemoteOptimizer([("n", torch.zeros(2, dtype=torch.int64))], "ipc:///tmp/x")
    with pytest.raises(gradq.LayoutMismatch, match="one name"):
        RemoteOptimizer([("n", torch.zeros(2))] * 2, "ipc:///tmp/x")
    with pytest.raises(ValueError, match="GRADQ_ADDRESS"):
        RemoteOptimizer(net().named_parameters())


def blocks(path: Path) -> list:
    """Python of a page that uses the package."""
    found = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    return [code for code in found if "gradq" in code]


@pytest.mark.parametrize(("page", "number"), [(ROOT / "README.md", 0), (PACKAGE / "README.md", 0),
                                              (PACKAGE / "README.md", 1)])
def test_the_code_on_the_pages_runs_and_learns(service, page, number, capsys):  # noqa: F811
    service.up("--optimizer", "sgd", "--set", "lr=0.1")
    batches = [(torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)) for _ in range(20)]
    code, count = re.subn("tcp://127.0.0.1:5600", service.address, blocks(page)[number])
    assert count == 1
    names = {"batches": batches}
    exec(compile(code, str(page), "exec"), names)  # pylint: disable=exec-used
    service.until(lambda s: s["actors"][0]["state"] == "gone", "its bye")
    if "model" in names:
        assert names["model"](batches[0][0]).argmax(1).tolist() == [0] * 8
    else:
        said = re.findall(r"0\.9999\d+|1\.0*\b", capsys.readouterr().out)
        assert len(said) == 3, "the minimum of the loss is at 1"


@contextlib.contextmanager
def run_up(directory: Path, *words):
    """`tools/gradq up` that ends by itself, or is brought down; its process."""
    argv = [ROOT / "tools/gradq", "up", "--run", directory, "--build", BUILD, *words]
    with subprocess.Popen([str(word) for word in argv], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env={**os.environ, **PYTHON},
                          stdin=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            print(child.communicate(timeout=150 * SLOW)[0])


def rows(directory: Path, number: int) -> list:
    path = directory / f"metrics/actor-{number}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


EPOCHS, SEEDS = 30, range(1, 6)


def test_digits_reach_the_accuracy_of_the_same_script_alone(run_dir):
    """EPOCHS alone, and divided among two actors: the means over SEEDS are apart by no more than
    three standard errors of their difference (README of the package: what they are)."""
    pytest.importorskip("sklearn")
    alone, together = [], []
    words = [sys.executable, str(EXAMPLES / "digits.py"), "--epochs", str(EPOCHS)]
    without = {name: value for name, value in os.environ.items() if name[:6] != "GRADQ_"}
    for seed in SEEDS:
        said = subprocess.run(words, capture_output=True, text=True, timeout=200 * SLOW, check=True,
                              env={**without, **PYTHON, "GRADQ_SEED": str(seed)}).stdout
        alone.append(float(re.search(r"accuracy ([\d.]+) %", said)[1]))
        run = run_dir / str(seed)
        with run_up(run, "--actors", 2, "--optimizer", "adam", "--set", "lr=3e-3", "--seed", seed,
                    "--no-tensorboard", "--actor-option", f"epochs={EPOCHS // 2}",
                    "--actor", " ".join(words[:2])) as child:
            assert child.wait(200 * SLOW) == 0
        last = [rows(run, number)[-1] for number in (0, 1)]
        assert [(each["actor"], each["episode"], each["length"]) for each in last] == [
            (0, EPOCHS // 2, 23), (1, EPOCHS // 2, 23)]
        together.append(max(last, key=lambda row: row["version"])["return"])
    print(f"alone {alone}, together {together}")
    error = math.hypot(*(statistics.stdev(each) / len(SEEDS) ** 0.5 for each in (alone, together)))
    apart = statistics.mean(alone) - statistics.mean(together)
    print(f"apart {apart:.2f} %, standard error {error:.2f} %")
    assert statistics.mean(alone) > 85 and abs(apart) <= 3 * max(error, 0.3)


def test_cartpole_of_python_reaches_its_target_under_the_supervisor(run_dir, with_gymnasium):
    with run_up(run_dir / "run", "--actors", 2, "--target-return", 50, "--seed", 1, "--actor",
                f"{with_gymnasium} {EXAMPLES / 'cartpole.py'}") as child:
        assert child.wait(200 * SLOW) == 0
        assert "solved" in child.stdout.read()
    assert all(len(rows(run_dir / "run", number)) > 10 for number in (0, 1))


def test_actors_in_c_and_in_python_train_one_model(run_dir, start, with_gymnasium):
    """The example brings the model, with the names, shapes and order of the C net, whose actor
    joins it."""
    run, log = run_dir / "run", run_dir / "mixed.jsonl"
    with run_up(run, "--actors", 0) as child:
        address = child.stdout.readline().split()[1]
        python = start(with_gymnasium, EXAMPLES / "cartpole.py", env={
            **PYTHON, "GRADQ_ADDRESS": address, "GRADQ_ACTOR": "7", "GRADQ_METRICS": str(log)})

        def acknowledged(*ids):
            assert python.running(), python.report()
            answer = subprocess.run([BUILD / "gradq-top", "--run", run, "--once", "--json"],
                                    capture_output=True, text=True, timeout=60 * SLOW, check=True)
            seen = {each["id"]: each for each in json.loads(answer.stdout)["actors"]}
            assert set(seen) == set(ids), seen
            assert all(each["refused"] == 0 for each in seen.values()), seen
            return {id: each["acknowledged"] for id, each in seen.items()}
        wait_for(lambda: acknowledged(7)[7] >= 10, 60, "the model, and its first steps")
        before = acknowledged(7)[7]
        subprocess.run([ROOT / "tools/gradq", "scale", "1", "--run", run], check=True,
                       timeout=60 * SLOW, capture_output=True)
        wait_for(lambda: (each := acknowledged(0, 7))[0] >= 50 and each[7] >= before + 50, 60,
                 "gradients of both")
        assert python.stop() == 0, python.report()
    assert {json.loads(line)["actor"] for line in log.read_text().splitlines()} == {7}
