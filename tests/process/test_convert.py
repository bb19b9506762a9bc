"""gradq.convert: checkpoints become the state of PyTorch's optimizers, and that becomes the start
of a run, to the bit; and each side's next step is the other's."""
import copy
import math
import os
import re
import subprocess
import sys

import numpy
import pytest

from conftest import NEEDS_TORCH, ROOT, SLOW, python_with
from peer import service  # noqa: F401

PACKAGE = ROOT / "actors/python"
sys.path.insert(0, str(PACKAGE))
import gradq  # noqa: E402
from gradq import checkpoint as files, convert  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
pytestmark = NEEDS_TORCH

# Rule and settings here, and the same of torch.
RULES = {
    "adam": (("adam", "lr=0.01", "beta1=0.8", "weight_decay=0.1"),
             lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.999), weight_decay=0.1)),
    "adamw": (("adamw", "lr=0.01", "eps=1e-6"), lambda p: torch.optim.AdamW(p, 0.01, eps=1e-6)),
    "rmsprop": (("rmsprop", "lr=0.01"), lambda p: torch.optim.RMSprop(p)),
    "rmsprop-momentum": (("rmsprop", "lr=0.01", "momentum=0.9", "alpha=0.9"),
                         lambda p: torch.optim.RMSprop(p, 0.01, 0.9, momentum=0.9)),
    "adagrad": (("adagrad", "lr=0.1", "initial_accumulator_value=0.5"),
                lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5)),
    "sgd": (("sgd", "lr=0.25"), lambda p: torch.optim.SGD(p, 0.25)),
    "nesterov": (("sgd", "lr=0.25", "momentum=0.9", "nesterov=true"),
                 lambda p: torch.optim.SGD(p, 0.25, 0.9, nesterov=True))}


def net() -> "torch.nn.Module":
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def weights(model) -> dict:
    return {name: each.detach().numpy().copy() for name, each in model.named_parameters()}


def gradient(model, number: int) -> dict:
    print(f"gradient {number}")
    chance = numpy.random.default_rng(number)
    return {name: chance.standard_normal(tuple(each.shape)).astype("<f4")
            for name, each in model.named_parameters()}


def step(model, optimizer, number: int):
    for name, each in gradient(model, number).items():
        model.get_parameter(name).grad = torch.from_numpy(each)
    optimizer.step()


def assert_same(ours: dict, theirs: dict, bits: int, before: dict = None):
    """All equal to `bits` units in the last place of a weight, or of its step since `before`, which
    is rounded on its own and may be larger."""
    assert list(ours) == list(theirs)
    for name in ours:
        step = numpy.abs(theirs[name] - (before or theirs)[name])
        place = numpy.spacing(numpy.maximum(numpy.abs(theirs[name]), step))
        difference = numpy.abs(ours[name].astype("f8") - theirs[name])
        assert (difference <= bits * place).all(), (name, (difference / place).max())


def assert_same_state(ours, theirs):
    """Two state_dicts of optimizers, bit for bit; None and nothing are the same."""
    assert ours["param_groups"] == theirs["param_groups"]
    for index in theirs["param_groups"][0]["params"]:
        one, other = ({key: each for key, each in state["state"].get(index, {}).items()
                       if each is not None} for state in (ours, theirs))
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(torch.as_tensor(one[key], dtype=torch.float32),
                               torch.as_tensor(other[key], dtype=torch.float32)), (index, key)


def words(rule) -> list:
    name, *settings = RULES[rule][0]
    return ["--optimizer", name, *(word for each in settings for word in ("--set", each))]


@pytest.mark.parametrize("rule", RULES)
def test_each_side_goes_on_as_the_other_would(service, rule, run_dir):  # noqa: F811
    model = net()
    service.up(*words(rule), "--max-staleness", "0", "--checkpoints-kept", "9")
    with gradq.Client(service.address, initial=weights(model), timeout=30 * SLOW) as client:
        for number in range(5):
            client.pull()
            client.push(gradient(model, number))
            client.wait()
        assert service.optimizer.stop() == 0
        state = files.load(files.newest(service.run))
        assert (state.version, state.steps) == (5, 5)
        service.start_optimizer(*words(rule), "--max-staleness", "0", "--resume")
        client.pull()
        client.push(gradient(model, 5))
        client.wait()
        ours = dict(client.pull())

    # gradq -> torch: the same sixth step.
    parts, moments = convert.to_torch(state)
    assert list(parts) == list(model.state_dict())
    model.load_state_dict(parts)
    optimizer = RULES[rule][1](model.parameters())
    expected = copy.deepcopy(optimizer.state_dict()["param_groups"])
    optimizer.load_state_dict(copy.deepcopy(moments))
    assert optimizer.state_dict()["param_groups"] == expected, "settings are the run's"
    before = weights(model)
    step(model, optimizer, 5)
    assert_same(ours, weights(model), 2, before)
    assert any((before[name] != ours[name]).any() for name in ours)

    # torch -> gradq: equal to the bit, and the same seventh step.
    path = run_dir / "start.safetensors"
    begin = convert.from_torch(model, optimizer)
    begin.save(path)
    assert service.optimizer.stop() == 0
    other = service.run.with_name("other")
    service.start_optimizer(*begin.words(), "--init", path, "--max-staleness", "0",
                            "--checkpoints-kept", "9", run=other)
    with gradq.Client(service.address, layout={n: w.shape for n, w in weights(model).items()},
                      timeout=30 * SLOW) as client:
        assert_same(dict(client.pull()), weights(model), 0)
        client.push(gradient(model, 6))
        client.wait()
        ours = dict(client.pull())
    first = files.load(other / "checkpoints/checkpoint-000000000000.safetensors")
    assert first.scalars == begin.scalars and first.steps == begin.steps
    assert_same_state(convert.to_torch(first)[1], optimizer.state_dict())
    before = weights(model)
    step(model, optimizer, 6)
    assert_same(ours, weights(model), 2, before)


def test_moments_that_were_taken_over_outlive_a_kill(service, run_dir):  # noqa: F811
    model, path = net(), run_dir / "start.safetensors"
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for number in range(3):
        step(model, optimizer, number)
    begin = convert.from_torch(model, optimizer)
    begin.save(path)
    service.up(*begin.words(), "--init", path, "--max-staleness", "0")
    with gradq.Client(service.address, timeout=30 * SLOW) as client:
        client.pull()
        client.push(gradient(model, 3))
        client.wait()
        service.optimizer.kill()
        service.start_optimizer(*begin.words(), "--init", path, "--max-staleness", "0", "--resume")
        client.pull()
        client.push(gradient(model, 4))
        client.wait()
        ours = dict(client.pull())
        assert client.version == 2
    before = weights(model)
    for number in (3, 4):
        step(model, optimizer, number)
    assert_same(ours, weights(model), 4, before)


def test_a_state_of_another_rule_is_refused(service, run_dir):  # noqa: F811
    model, path = net(), run_dir / "start.safetensors"
    convert.from_torch(model, torch.optim.Adam(model.parameters())).save(path)
    service.start_broker()
    service.start_optimizer("--init", path, wait=False)  # sgd
    assert service.optimizer.wait() == 78
    assert "state of rule adam" in service.optimizer.stderr
    assert "--optimizer adam" in service.optimizer.stderr


def test_frozen_parameters_and_the_order_of_the_optimizer(run_dir):
    model = net()
    model.register_buffer("scale", torch.ones(3))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(reversed([each for each in model.parameters()
                                           if each.requires_grad]))
    step(model, optimizer, 0)
    state = convert.from_torch(model, optimizer)
    assert list(state.weights) == ["0.weight", "2.weight", "2.bias"]
    state.save(run_dir / "s.safetensors")
    again = convert.to_torch(files.load(run_dir / "s.safetensors"),
                             ["2.bias", "2.weight", "0.weight"])
    assert_same_state(again[1], optimizer.state_dict())


def test_what_one_side_cannot_do_is_said():
    def refused(pattern, make, parameters=None):
        model = net()
        optimizer = make(parameters(model) if parameters else model.parameters())
        with pytest.raises(convert.CannotConvert, match=pattern):
            convert.from_torch(model, optimizer)
    optim = torch.optim
    refused("amsgrad=True", lambda p: optim.Adam(p, amsgrad=True))
    refused("centered=True", lambda p: optim.RMSprop(p, centered=True))
    refused("weight_decay=0.5: gradq's sgd", lambda p: optim.SGD(p, 1, weight_decay=0.5))
    refused("lr_decay", lambda p: optim.Adagrad(p, lr_decay=0.5))
    refused("counterpart of Adamax", optim.Adamax)
    refused("differ in lr", optim.Adam, lambda model: [
        {"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1}])
    refused("not the model's", optim.Adam, lambda _: net().parameters())
    model = net()
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer, 0)
    optimizer.state[model[0].weight]["step"] += 1
    with pytest.raises(convert.CannotConvert, match="1 to 2 steps"):
        convert.from_torch(model, optimizer)
    one = {"w": numpy.zeros(1, "<f4")}
    for state, pattern in (
            (files.State(one, "lion", 1, {"exp_avg": one}), "no counterpart of rule lion"),
            (files.State(one, "rmsprop", settings={"epsilon": "inside"}), "only epsilon=outside"),
            (files.State(one), "weights alone")):
        with pytest.raises(convert.CannotConvert, match=pattern):
            convert.to_torch(state)


@pytest.mark.parametrize(("optimizer", "said"), [
    ([1], "what should be the optimizer's state"), ({}, "what should be the optimizer's state"),
    ({"param_groups": [{"params": [0]}], "state": {0: 5}}, "what should be the optimizer's state"),
    ({"param_groups": [{"params": list(range(4))}], "state": {}}, "betas are None"),
    ("lr", "lr is 'x', and no number"), ("step", "step is .*nan"), ("exp_avg", "and no tensor")],
    ids=str)
def test_an_optimizer_s_state_that_is_none_is_said(optimizer, said):
    model = net()
    if isinstance(optimizer, str):
        sound = torch.optim.Adam(model.parameters()).state_dict()
        sound["state"] = {i: {"step": 1, "exp_avg": each, "exp_avg_sq": each}
                          for i, each in enumerate(model.state_dict().values())}
        convert.from_states(model.state_dict(), sound, "adam")
        if optimizer == "lr":
            sound["param_groups"][0]["lr"] = "x"
        else:
            sound["state"][0][optimizer] = math.nan
        optimizer = sound
    with pytest.raises(convert.CannotConvert, match=said):
        convert.from_states(model.state_dict(), optimizer, "adam")


def test_a_state_that_lacks_what_its_rule_needs_is_said():
    one = {"w": numpy.zeros(1, "<f4")}
    whole = {"exp_avg": one, "exp_avg_sq": one}
    settings = {"beta1": "0.9", "beta2": "0.999"}
    convert.to_torch(files.State(one, "adam", 1, whole, settings=settings))
    for state, said in (
            (files.State(one, "adam", 1, whole), "beta1 is missing"),
            (files.State(one, "adam", 1, whole, settings={**settings, "lr": "x"}), "lr is 'x'"),
            (files.State(one, "adam", 1, {"exp_avg": one}, settings=settings), "exp_avg_sq of")):
        with pytest.raises(convert.CannotConvert, match=said):
            convert.to_torch(state)


@pytest.mark.parametrize("header", [
    b"[]", b"3", b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b'{"__metadata__":[]}'])
def test_a_header_that_is_no_object_of_different_names_is_malformed(run_dir, header):
    path = run_dir / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(files.Malformed, match="odd.safetensors: no safetensors file"):
        files.read(path)


@pytest.fixture
def command(capsys):
    """command(*words, fails=None) -> what it printed; fails: words of the error."""
    def run(*words, fails: str = None) -> str:
        capsys.readouterr()
        code, said = convert.main([str(word) for word in words]), capsys.readouterr()
        assert (code, fails is None) in ((0, True), (1, False)) and (fails or "") in said.err, said
        return said.out
    return run


def test_the_command_converts_both_ways(run_dir, command):
    model, pt, st = net(), run_dir / "a.pt", run_dir / "a.safetensors"
    optimizer = torch.optim.AdamW(model.parameters(), 0.125)
    step(model, optimizer, 0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, pt)
    said = command(pt, st, "--optimizer", "adamw", "--trust")
    assert "--optimizer adamw" in said and "--set lr=0.125" in said and f"--init {st}" in said
    assert command(st, run_dir / "b.pt") == f"{run_dir / 'b.pt'}: model and optimizer\n"
    back = torch.load(run_dir / "b.pt")
    assert_same_state(back["optimizer"], optimizer.state_dict())
    model.load_state_dict(back["model"])

    subprocess.run([sys.executable, "-m", "gradq.convert", st, run_dir / "w.safetensors",
                    "--weights-only"], env={**os.environ, "PYTHONPATH": str(PACKAGE)}, check=True,
                   timeout=120 * SLOW)
    assert command(st, run_dir / "w.pt", "--weights-only") == f"{run_dir / 'w.pt'}: model\n"
    tensors, metadata = files.read(run_dir / "w.safetensors")
    assert list(tensors) == list(model.state_dict()) and metadata == {"format": "pt"}
    assert_same(tensors, weights(model), 0)
    net().load_state_dict(torch.load(run_dir / "w.pt"))

    command(pt, st, "--trust", fails="--optimizer RULE")
    command(run_dir / "w.safetensors", run_dir / "c.safetensors", fails="--weights-only")
    command(run_dir, st, fails="holds no checkpoint")
    command(run_dir / "missing.pt", st, fails="missing.pt")
    st.write_bytes(st.read_bytes()[:-1])
    command(st, run_dir / "c.pt", fails="damaged or cut off")
    pt.write_bytes(b"garbage")
    command(pt, st, "--weights-only", fails="if you trust it, add --trust")
    assert not (run_dir / "c.pt").exists() and not list(run_dir.glob("*.new"))


def test_the_code_on_the_page_runs(run_dir, monkeypatch, capsys):
    page = (PACKAGE / "README.md").read_text()
    code, = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
             if "convert" in each]
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.125)
    step(model, optimizer, 0)
    monkeypatch.chdir(run_dir)
    (run_dir / "run/checkpoints").mkdir(parents=True)
    convert.from_torch(model, optimizer).save("run/checkpoints/checkpoint-000000000001.safetensors")
    names = {"model": model, "optimizer": optimizer}
    exec(compile(code, "README.md", "exec"), names)  # pylint: disable=exec-used
    assert_same_state(names["moments"], optimizer.state_dict())
    assert "--optimizer adam --set lr=0.125" in capsys.readouterr().out
    assert list(files.load("weights.safetensors").weights) == list(model.state_dict())


def test_the_safetensors_package_reads_what_is_written(run_dir):
    python = python_with("safetensors, numpy")
    tensors = {"z": numpy.arange(6, dtype="<f4").reshape(2, 3), "a": numpy.array(0.1, "<f4")}
    files.save_weights(run_dir / "w.safetensors", tensors)
    files.State(tensors, "sgd", 1, {"momentum_buffer": tensors}).save(run_dir / "s.safetensors")
    code = ("import sys, safetensors.numpy as s; print({k: (v.shape, v.tolist()) "
            "for k, v in sorted(s.load_file(sys.argv[1]).items())})")
    for name, prefixes in (("w", [""]), ("s", ["", "momentum_buffer."])):
        said = subprocess.run([python, "-c", code, run_dir / f"{name}.safetensors"], check=True,
                              capture_output=True, text=True, timeout=60 * SLOW).stdout
        assert said.strip() == str({k: (v.shape, v.tolist()) for k, v in sorted(
            (prefix + key, each) for prefix in prefixes for key, each in tensors.items())})
