"""tools/gradq as its users see it, on the real processes.

Run from the root of the tree, after `make`:
    /usr/bin/python3 -m pytest tests/process/test_supervisor.py
BUILD names another directory of binaries.
"""

import contextlib
import glob
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from peer import read_safetensors

sys.path.insert(0, os.path.abspath("tools"))
from gradq_watch import Episodes, Refusals  # noqa: E402

GRADQ = os.path.abspath("tools/gradq")
BUILD = os.path.abspath(os.environ.get("BUILD", "build"))
WAIT_S = 90
SEED = 7


def gradq(command, run, *words, wait_s=WAIT_S, **more):
    return subprocess.run([GRADQ, command, "--run", run, "--build", BUILD, *words],
                          capture_output=True, text=True, timeout=wait_s, check=False,
                          stdin=subprocess.DEVNULL, **more)


def wait_for(condition, what, wait_s=WAIT_S):
    """Ask until it holds; fail loudly when it does not in time."""
    deadline = time.monotonic() + wait_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {wait_s} s for {what}"
        time.sleep(0.05)


def gone(pid):
    """Ended: no such process, or one that waits only for its parent to ask."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def supervisord_pid(run):
    with open(os.path.join(run, "supervisor", "supervisord.pid"), encoding="utf-8") as file:
        return int(file.read())


def processes(run):
    answer = gradq("status", run, "--json")
    return {row["name"]: row for row in json.loads(answer.stdout)["processes"]}


def checkpoints(run):
    return [path for path in glob.glob(os.path.join(run, "**", "*.safetensors"), recursive=True)
            if "/old/" not in path]


def pids(run):
    return [row["pid"] for row in processes(run).values()]


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="gq-", dir="/tmp") as directory:
        yield directory


@pytest.fixture
def run(place):
    """The path of a run directory; what still runs there is stopped afterwards."""
    path = os.path.join(place, "run")
    yield path
    if os.path.exists(os.path.join(path, "settings.json")):
        assert gradq("down", path).returncode == 0


@pytest.fixture
def service(run):
    """A detached run of two CartPole actors."""
    answer = up(run, "--detach", "--actors", "2")
    assert answer.returncode == 0, answer.stderr
    return run


def up(run, *words, **more):
    print(f"seed {SEED}")
    # The recorder is there or not with the packages of the machine; see test_tensorboard.py.
    return gradq("up", run, "--seed", str(SEED), "--no-tensorboard", *words, **more)


@contextlib.contextmanager
def foreground(run, *words):
    """`up` in the foreground, past its start."""
    argv = [GRADQ, "up", "--run", run, "--build", BUILD, "--seed", str(SEED), "--no-tensorboard",
            *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL) as child:
        try:
            assert child.stdout.readline().startswith("address: "), child.stderr.read()
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
            child.communicate(timeout=WAIT_S)


# ---- up and down ----

def test_a_foreground_run_ends_solved_with_exit_0_and_a_checkpoint(run):
    # 30 is above what a fresh policy plays (about 20), and reached within seconds.
    answer = up(run, "--actors", "2", "--target-return", "30")
    assert answer.returncode == 0, answer.stderr
    assert "solved: mean return" in answer.stdout and f"seed {SEED}" in answer.stdout
    assert f"run directory: {run}" in answer.stdout
    assert checkpoints(run) and "last checkpoint: none" not in answer.stdout
    with open(os.path.join(run, "metrics", "run.jsonl"), encoding="utf-8") as file:
        for line in file:
            assert {"elapsed_s", "steps", "depth", "staleness_p50"} <= set(json.loads(line))


def test_a_target_that_max_steps_cuts_off_exits_1_with_a_sentence(run):
    answer = up(run, "--actors", "2", "--target-return", "501", "--max-steps", "2000")
    assert answer.returncode == 1
    assert "not solved" in answer.stderr and checkpoints(run)


def test_max_steps_without_a_target_exits_0(run):
    answer = up(run, "--actors", "2", "--max-steps", "2000")
    assert answer.returncode == 0, answer.stderr
    assert "done: " in answer.stdout


def test_detach_prints_the_address_and_status_tells_every_process(service):
    answer = gradq("status", service, "--json")
    status = json.loads(answer.stdout)
    assert status["address"] == f"ipc://{service}/control"
    assert [row["name"] for row in status["processes"]] == ["broker", "optimizer", "actor-0",
                                                            "actor-1"]
    for row in status["processes"]:
        assert set(row) == {"name", "state", "pid", "restarts"}
        assert row["state"] == "RUNNING" and row["restarts"] == 0
        os.kill(row["pid"], 0)


def test_up_detach_prints_one_address_line_that_gradq_top_understands(run):
    answer = up(run, "--detach", "--actors", "0")
    assert answer.returncode == 0, answer.stderr
    address = next(line for line in answer.stdout.splitlines() if line.startswith("address: "))
    top = subprocess.run([os.path.join(BUILD, "gradq-top"), "--address", address.split()[1],
                          "--once", "--json"], capture_output=True, timeout=WAIT_S, check=False)
    assert json.loads(top.stdout)["queue"]["depth"] == 0


def test_down_ends_every_process_and_leaves_a_checkpoint(service):
    before = pids(service) + [supervisord_pid(service)]
    assert gradq("down", service).returncode == 0
    assert all(gone(pid) for pid in before)
    assert checkpoints(service)
    assert not os.path.exists(os.path.join(service, "address"))
    assert gradq("status", service).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_up_stops_everything_cleanly(run, number):
    with foreground(run, "--actors", "2") as child:
        before = pids(run)
        child.send_signal(number)
        _, said = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, said
    assert all(gone(pid) for pid in before)
    assert checkpoints(run)


def test_down_from_elsewhere_ends_a_foreground_run(run):
    with foreground(run, "--actors", "2") as child:
        assert gradq("down", run).returncode == 0
        assert child.wait(WAIT_S) == 0


def test_a_detached_run_with_a_target_ends_by_itself(run):
    answer = up(run, "--detach", "--actors", "2", "--target-return", "30")
    assert answer.returncode == 0, answer.stderr
    result = os.path.join(run, "result.json")
    wait_for(lambda: os.path.exists(result), "result.json")
    with open(result, encoding="utf-8") as file:
        assert json.load(file)["text"].startswith("solved: ")
    pid = supervisord_pid_or_none(run)
    wait_for(lambda: pid is None or gone(pid), "the end of supervisord")
    assert checkpoints(run)


def supervisord_pid_or_none(run):
    try:
        return supervisord_pid(run)
    except FileNotFoundError:
        return None  # it has ended and tidied up


# ---- deaths ----

def test_a_killed_actor_comes_back_and_the_others_never_notice(service):
    before = processes(service)
    os.kill(before["actor-1"]["pid"], signal.SIGKILL)
    after = wait_for(lambda: changed(service, "actor-1", before), "a new actor-1")
    assert after["actor-1"]["restarts"] == 1
    for name in ("broker", "optimizer", "actor-0"):
        assert after[name] == before[name]


def changed(run, name, before):
    now = processes(run)
    fresh = now[name]["pid"] not in (None, before[name]["pid"])
    return now if fresh and now[name]["state"] == "RUNNING" else None


@pytest.mark.parametrize("name", ["broker", "optimizer"])
def test_a_killed_service_comes_back_and_gradients_flow_again(service, name):
    before = processes(service)
    wait_for(lambda: applied(service), "a first applied gradient")
    os.kill(before[name]["pid"], signal.SIGKILL)
    wait_for(lambda: changed(service, name, before), f"a new {name}")
    # Its counters may begin anew: that they rise after the restart is what counts.
    low = wait_for(lambda: applied(service), "figures after the restart")
    wait_for(lambda: (applied(service) or 0) > low, "gradients applied after the restart")


def figures(run):
    """What gradq-top says; None while no broker answers."""
    answer = subprocess.run([os.path.join(BUILD, "gradq-top"), "--run", run, "--once", "--json"],
                            capture_output=True, timeout=WAIT_S, check=False)
    return json.loads(answer.stdout) if answer.returncode == 0 else None


def applied(run):
    found = figures(run)
    return found and found["optimizer"]["applied"]


def test_a_process_killed_again_and_again_is_never_held_to_be_broken(service):
    # More often than supervisord tries a start that fails; each of those would wait longer.
    for _ in range(25):
        pid = wait_for(lambda: processes(service)["actor-0"]["pid"], "actor-0 to come back", 15)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: gone(pid), "the killed process to end")
    wait_for(lambda: processes(service)["actor-0"]["state"] == "RUNNING", "actor-0 to run", 15)
    assert processes(service)["actor-0"]["restarts"] >= 25


def test_no_orphan_outlives_a_killed_supervisord(service):
    before = pids(service)
    os.kill(supervisord_pid(service), signal.SIGKILL)
    wait_for(lambda: all(gone(pid) for pid in before), "the end of every process")


def test_a_killed_up_takes_its_run_with_it(run):
    with foreground(run, "--actors", "2") as child:
        before = pids(run) + [supervisord_pid(run)]
        child.kill()
        wait_for(lambda: all(gone(pid) for pid in before), "the end of every process")
    assert checkpoints(run)


def test_after_a_killed_supervisord_up_works_again(service):
    before = pids(service)
    os.kill(supervisord_pid(service), signal.SIGKILL)
    wait_for(lambda: all(gone(pid) for pid in before), "the end of every process")
    answer = up(service, "--detach", "--resume")
    assert answer.returncode == 0, answer.stderr
    assert len(processes(service)) == 4  # the two actors of the settings too


# ---- what cannot run ----

@pytest.mark.parametrize("words, said", [
    (["--optimizer", "adamm"], "adamm"),
    (["--optimizer", "/nonexistent/mine.so"], "mine.so"),
    (["--set", "lrr=1"], "lrr"),
    (["--env", "CartPole-v9"], "CartPole-v9"),
    (["--broker-option", "capacity=-4"], "capacity"),
    (["--broker-option", "capacitty=4"], "capacitty"),
    (["--actor-option", "rollout=0"], "rollout"),
])
def test_bad_configuration_exits_78_with_the_process_own_words(run, words, said):
    answer = up(run, "--detach", "--actors", "1", *words)
    assert answer.returncode == 78, answer.stderr
    assert said in answer.stderr
    assert gradq("status", run).returncode == 1  # nothing is left running


@pytest.mark.parametrize("words, said", [
    (["--optimizer", "adamm"], "adamm"),
    (["--set", "lrr=1"], "lrr"),
    (["--env", "CartPole-v9"], "CartPole-v9"),
    (["--broker-option", "capacitty=4"], "capacitty"),
    (["--optimizer-option", "aggregate=0"], "aggregate"),
    (["--actor-option", "rollout=0"], "rollout"),
])
def test_a_slip_of_the_pen_does_not_move_an_earlier_run_aside(place, words, said):
    run = os.path.join(place, "kept")
    os.mkdir(run)
    for name in ("settings.json", "keepsake"):
        with open(os.path.join(run, name), "w", encoding="utf-8") as file:
            file.write("{}")
    answer = up(run, "--detach", "--actors", "1", *words)
    assert answer.returncode == 78 and said in answer.stderr, answer
    assert set(os.listdir(run)) - {"up.lock"} == {"settings.json", "keepsake"}


@pytest.mark.parametrize("how, words, name", [
    ("environment", [], "sgd"), ("environment", ["--optimizer", "lion"], "lion"),
    ("file", [], "sgd"), ("file", ["--optimizer", "lion"], "lion"), ("nothing", [], "adam")])
def test_the_rule_comes_from_flag_environment_or_file_in_this_order(run, place, how, words, name):
    more = {}
    if how == "environment":
        more = {"env": {**os.environ, "GRADQ_OPTIMIZER": "sgd"}}
    elif how == "file":
        with open(os.path.join(place, "gradq.ini"), "w", encoding="utf-8") as file:
            file.write("[optimizer]\noptimizer = sgd\n")
        words = [*words, "--optimizer-option", f"config={os.path.join(place, 'gradq.ini')}"]
    answer = up(run, "--detach", "--actors", "0", *words, **more)
    assert answer.returncode == 0, answer.stderr
    top = subprocess.run([os.path.join(BUILD, "gradq-top"), "--run", run, "--once", "--json"],
                         capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert json.loads(top.stdout)["optimizer"]["name"] == name


def test_what_actors_are_told_in_the_environment_ends_no_optimizer(run):
    answer = up(run, "--detach", "--actors", "1", env={**os.environ, "GRADQ_LANE": "shm"})
    assert answer.returncode == 0, answer.stderr
    assert {row["state"] for row in processes(run).values()} == {"RUNNING"}


def test_up_says_so_when_every_gradient_of_some_seconds_is_refused():
    refusals, said = Refusals(), []
    looks = [(0, 10, {}), (1, 20, {"stale": 5}), (2, 20, {"stale": 5}), (4, 20, {"stale": 5}),
             # From here on.
             (5, 20, {"stale": 5, "nonfinite": 7}), (6, 20, {"stale": 5, "nonfinite": 9}),
             (7, 21, {"stale": 5, "nonfinite": 9}),  # one was applied
             (8, 21, {"stale": 6, "nonfinite": 9}), (11, 21, {"stale": 9, "nonfinite": 9}),
             (12, 0, {}), (16, 0, {"stale": 1})]  # another life
    for now, applied, by in looks:
        said.append((now, refusals.look({"applied": applied, "rejected": sum(by.values()),
                                         "rejected_by": by}, now)))
    assert refusals.look({}, 99) is None and refusals.look(None, 99) is None
    told = {now: text for now, text in said if text}
    assert list(told) == [5, 11, 16], told
    assert "last 4 s was refused, 7 of them: nonfinite; weights" in told[5]
    assert "3 of them: stale; fewer" not in told[5] and ": stale; fewer actors" in told[11]


def test_a_port_in_use_is_reported_and_nothing_is_left(run):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        answer = up(run, "--detach", "--actors", "1", "--address", f"tcp://127.0.0.1:{port}")
    assert answer.returncode in (1, 78)
    assert str(port) in answer.stderr
    assert gradq("status", run).returncode == 1


def test_an_actor_command_that_does_not_exist_exits_78(run):
    answer = up(run, "--actor", "no-such-command-here")
    assert answer.returncode == 78 and "no-such-command-here" in answer.stderr


def test_up_refuses_a_directory_whose_run_is_live(service):
    before = processes(service)
    answer = up(service, "--detach")
    assert answer.returncode == 1 and "live" in answer.stderr
    assert processes(service) == before


def test_up_refuses_a_directory_that_is_something_else(place):
    with open(os.path.join(place, "thesis.tex"), "w", encoding="utf-8") as file:
        file.write("mine")
    answer = up(place, "--detach")
    assert answer.returncode == 78 and "no run directory" in answer.stderr
    # up.lock is all that it may leave.
    assert set(os.listdir(place)) - {"up.lock"} == {"thesis.tex"}


@pytest.mark.parametrize("words, said", [
    ([], "COMMAND"),
    (["stauts"], "status"),
    (["up", "--optimiser", "adam"], "--optimizer"),
    (["up", "--actors", "x"], "number"),
    (["up", "--set", "lr"], "KEY=VALUE"),
    (["up", "--address", "udp://x"], "tcp://"),
    (["up", "--broker-option", "address=x"], "itself"),
    (["up", "--target-return", "nan"], "number"),
    (["scale", "5000"], "4096"),
    (["swap"], "--optimizer"),
])
def test_a_wrong_word_exits_2_and_names_the_right_one(words, said):
    answer = subprocess.run([GRADQ, *words], capture_output=True, text=True, timeout=WAIT_S,
                            check=False)
    assert answer.returncode == 2
    assert said in answer.stderr and "--help" in answer.stderr


@pytest.mark.parametrize("command", ["status", "scale", "swap", "logs", "checkpoint", "down"])
def test_a_command_without_a_run_says_how_to_start_one(run, command):
    words = {"scale": ["2"], "swap": ["--optimizer", "sgd"], "logs": ["broker"]}.get(command, [])
    answer = gradq(command, run, *words)
    assert answer.returncode == 1 and "tools/gradq up" in answer.stderr


# ---- changes to a live run ----

def test_scale_adds_and_removes_actors_and_leaves_the_others_alone(service):
    before = processes(service)
    assert gradq("scale", service, "4").returncode == 0
    wider = processes(service)
    assert {"actor-2", "actor-3"} == set(wider) - set(before)
    assert gradq("scale", service, "1").returncode == 0
    after = processes(service)
    assert set(after) == {"broker", "optimizer", "actor-0"}
    assert all(after[name] == before[name] for name in after)
    assert gone(wider["actor-3"]["pid"])


@pytest.mark.parametrize("code", [78, 1])  # refused at once; crashes until it is held to be broken
def test_actors_that_cannot_run_are_taken_back_and_the_others_go_on(run, place, code):
    build = Path(place, "build")
    build.mkdir()
    for program in Path(BUILD).glob("gradq-*"):
        (build / program.name).symlink_to(program)
    answer = up(run, "--build", build, "--detach", "--actors", "2")
    assert answer.returncode == 0, answer.stderr
    (build / "gradq-actor").unlink()
    (build / "gradq-actor").write_text(f"#!/bin/sh\necho no such game >&2; exit {code}\n")
    (build / "gradq-actor").chmod(0o755)
    before = processes(run)
    answer = gradq("scale", run, "4", "--build", build)
    assert answer.returncode == code and "no such game" in answer.stderr, answer
    assert "goes on with 2 actors" in answer.stderr
    assert processes(run) == before
    with open(os.path.join(run, "settings.json"), encoding="utf-8") as file:
        assert json.load(file)["actors"] == 2
    (build / "gradq-actor").unlink()
    (build / "gradq-actor").symlink_to(Path(BUILD, "gradq-actor"))
    answer = gradq("scale", run, "4", "--build", build)
    assert answer.returncode == 0, answer.stderr  # what crashed before is forgotten


@pytest.mark.parametrize("code", [0, 78])
def test_swap_asks_nothing_of_actors_that_have_ended(run, code):
    answer = up(run, "--detach", "--actors", "1", "--actor",
                f"sh -c 'until test -e {run}/go; do sleep 0.02; done; exit {code}'")
    assert answer.returncode == 0, answer.stderr
    Path(run, "go").touch()
    wait_for(lambda: processes(run)["actor-0"]["state"] == "EXITED", "the actor's end")
    answer = gradq("swap", run, "--optimizer", "sgd")
    assert answer.returncode == 0, answer.stderr
    assert figures(run)["optimizer"]["name"] == "sgd"


def test_swap_changes_the_rule_and_nothing_else(service):
    before = processes(service)
    answer = gradq("swap", service, "--optimizer", "sgd", "--set", "lr=0.01")
    assert answer.returncode == 0, answer.stderr
    after = processes(service)
    assert after["optimizer"]["pid"] != before["optimizer"]["pid"]
    assert after["actor-0"]["pid"] == before["actor-0"]["pid"]
    assert figures(service)["optimizer"]["name"] == "sgd"


def test_swap_and_back_goes_on_with_what_the_first_rule_remembers(service):
    for rule in ("sgd", "adam"):
        low = wait_for(lambda: applied(service), "figures")
        wait_for(lambda: (applied(service) or 0) > low, "gradients applied by the rule in force")
        answer = gradq("swap", service, "--optimizer", rule)
        assert answer.returncode == 0, answer.stderr
    assert gradq("down", service).returncode == 0
    _, meta = read_safetensors(Path(max(checkpoints(service))))
    retired = json.loads(meta["retired"])
    assert (meta["optimizer"], retired["optimizer"]) == ("adam", "sgd")
    # Every step since the first is one of either rule's, none of a rule that began anew.
    assert retired["optimizer_steps"] > 0
    assert int(meta["optimizer_steps"]) + retired["optimizer_steps"] == int(meta["version"])


@pytest.mark.parametrize("words", [["--optimizer", "sdg"],
                                   ["--optimizer", "sgd", "--set", "moment=1"],
                                   ["--optimizer", "./nowhere.so"]])
def test_swap_to_a_bad_rule_exits_78_and_the_old_one_goes_on(service, words):
    before = processes(service)
    answer = gradq("swap", service, *words)
    assert answer.returncode == 78 and "goes on" in answer.stderr
    assert processes(service) == before


def test_checkpoint_writes_a_new_one_and_prints_its_path(service):
    wait_for(lambda: applied(service), "a first applied gradient")
    answer = gradq("checkpoint", service)
    assert answer.returncode == 0, answer.stderr
    first = os.stat(answer.stdout.strip()).st_mtime_ns
    again = gradq("checkpoint", service)
    assert os.stat(again.stdout.strip()).st_mtime_ns > first


def test_logs_prints_what_a_process_logged_and_names_the_known_ones(service):
    assert gradq("logs", service, "broker").stdout
    answer = gradq("logs", service, "brokr")
    assert answer.returncode == 2 and "broker" in answer.stderr


def test_logs_follow_goes_on_as_the_log_grows(service):
    path = os.path.join(service, "log", "actor-0.out")
    with subprocess.Popen([GRADQ, "logs", "--run", service, "actor-0", "-f"],
                          stdout=subprocess.PIPE, text=True) as child:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write("a line that comes later\n")
            assert any("comes later" in line for line in child.stdout)
        finally:
            child.kill()


# ---- several runs, old runs, odd places ----

def test_two_runs_live_side_by_side(place):
    both = [os.path.join(place, name) for name in ("one", "two words; 100% #odd")]
    try:
        for run in both:
            answer = up(run, "--detach", "--actors", "1")
            assert answer.returncode == 0, answer.stderr
        first, second = (processes(run) for run in both)
        assert len({row["pid"] for row in [*first.values(), *second.values()]}) == 6
        assert gradq("down", both[0]).returncode == 0
        assert processes(both[1]) == second
    finally:
        for run in both:
            gradq("down", run)


def test_a_second_run_in_one_directory_keeps_the_first_ones_files(run):
    assert up(run, "--actors", "1", "--max-steps", "500").returncode == 0
    kept = {os.path.relpath(path, run) for path in checkpoints(run)}
    answer = up(run, "--actors", "1", "--max-steps", "500")
    assert answer.returncode == 0, answer.stderr
    assert "moved to" in answer.stdout
    for path in kept:
        assert os.path.exists(os.path.join(run, "old", "1", path))


def test_resume_goes_on_with_the_settings_of_the_run(run):
    assert up(run, "--actors", "1", "--optimizer", "sgd", "--max-steps", "500").returncode == 0
    answer = gradq("up", run, "--resume", "--detach")
    assert answer.returncode == 0, answer.stderr
    assert not os.path.exists(os.path.join(run, "old"))
    with open(os.path.join(run, "settings.json"), encoding="utf-8") as file:
        settings = json.load(file)
    assert (settings["optimizer"], settings["seed"], settings["actors"]) == ("sgd", SEED, 1)


def test_a_run_directory_with_a_long_path_keeps_its_sockets_elsewhere(place):
    run = os.path.join(place, "x" * 100)
    try:
        answer = up(run, "--detach", "--actors", "1")
        assert answer.returncode == 0, answer.stderr
        assert "too long" in answer.stdout
        address = json.loads(gradq("status", run, "--json").stdout)["address"]
        private = os.path.dirname(address.removeprefix("ipc://"))
        assert os.stat(private).st_mode & 0o777 == 0o700
    finally:
        assert gradq("down", run).returncode == 0
    assert not os.path.exists(private)


def test_tcp_chooses_free_ports_by_itself(run):
    answer = up(run, "--detach", "--actors", "1", "--address", "tcp")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(gradq("status", run, "--json").stdout)["address"].startswith(
        "tcp://127.0.0.1:")


# ---- other actors ----

def test_an_actor_command_finds_its_place_in_the_environment(run, place):
    out = os.path.join(place, "seen")
    program = f"env > {out}.$GRADQ_ACTOR.new; mv {out}.$GRADQ_ACTOR.new {out}.$GRADQ_ACTOR"
    command = f"sh -c {shlex.quote(program + '; exec tail -f /dev/null')}"
    answer = up(run, "--detach", "--actors", "2", "--actor", command)
    assert answer.returncode == 0, answer.stderr
    wait_for(lambda: os.path.exists(out + ".0") and os.path.exists(out + ".1"), "both actors")
    with open(out + ".1", encoding="utf-8") as file:
        seen = dict(line.split("=", 1) for line in file.read().splitlines() if "=" in line)
    assert seen["GRADQ_ADDRESS"] == f"ipc://{run}/control"
    assert seen["GRADQ_ACTOR"] == "1" and seen["GRADQ_SEED"] == str(SEED)
    assert seen["GRADQ_RUN"] == run
    assert seen["GRADQ_METRICS"] == os.path.join(run, "metrics", "actor-1.jsonl")


def test_an_actor_that_finishes_is_not_started_again(run, place):
    mark = os.path.join(place, "mark")
    command = f"sh -c {shlex.quote(f'echo once >> {mark}')}"
    answer = up(run, "--actors", "1", "--actor", command)
    assert answer.returncode == 0, answer.stderr
    assert "every actor has finished" in answer.stdout
    with open(mark, encoding="utf-8") as file:
        assert file.read() == "once\n"


def test_an_actor_that_crashes_at_once_is_retried_and_then_reported(run):
    answer = up(run, "--actors", "1", "--actor", "sh -c 'echo it is broken; exit 3'")
    assert answer.returncode == 1
    assert "actor-0" in answer.stderr and "it is broken" in answer.stderr


def test_up_says_what_it_waits_for_before_the_first_episode(run):
    argv = [GRADQ, "up", "--run", run, "--build", BUILD, "--no-tensorboard", "--actors", "1",
            "--actor", "sleep 30"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL) as child:
        try:
            assert any("no actor has joined" in line for line in child.stdout)
        finally:
            child.terminate()
        rest = child.stdout.read()
    assert "last checkpoint: none, as no actor had brought weights" in rest


# ---- counting episodes, without processes ----

def write(path, *episodes):
    with open(path, "a", encoding="utf-8") as file:
        for when, value in episodes:
            file.write(json.dumps({"time": when, "return": value, "length": 10}) + "\n")


def test_the_last_100_episodes_are_those_of_all_actors_in_order_of_time(place):
    generator = random.Random(SEED)
    print(f"seed {SEED}")
    all_episodes = [(when, generator.randrange(500)) for when in range(300)]
    shuffled = random.Random(SEED + 1).sample(all_episodes, len(all_episodes))
    for number in range(3):
        write(os.path.join(place, f"actor-{number}.jsonl"), *shuffled[number::3])
    episodes = Episodes(place, {})
    episodes.poll()
    assert episodes.mean() == sum(value for _, value in all_episodes[-100:]) / 100
    assert (episodes.count, episodes.steps) == (300, 3000)


def test_the_target_needs_100_episodes(place):
    path = os.path.join(place, "actor-0.jsonl")
    episodes = Episodes(place, {})
    write(path, *[(when, 500) for when in range(99)])
    episodes.poll()
    assert episodes.mean() == 500 and not episodes.reached(475)
    write(path, (99, 500))
    episodes.poll()
    assert episodes.reached(475) and not episodes.reached(501) and not episodes.reached(None)


def test_a_line_written_in_two_halves_counts_once_and_nonsense_never(place):
    path = os.path.join(place, "actor-0.jsonl")
    episodes = Episodes(place, {})
    with open(path, "w", encoding="utf-8") as file:
        for text in ('{"time": 1, "return": 5,', ' "length": 7}\n[]\n{"time": 1}\n\0\n'
                     '{"time": 1, "return": NaN, "length": 1}\n"x"\n3\n'):
            file.write(text)
            file.flush()
            episodes.poll()
    assert (episodes.count, episodes.steps, episodes.mean()) == (1, 7, 5)


def test_episodes_of_an_earlier_life_of_the_run_do_not_count(place):
    path = os.path.join(place, "actor-0.jsonl")
    write(path, (1, 500))
    episodes = Episodes(place, {"actor-0.jsonl": os.path.getsize(path)})
    write(path, (2, 10))
    episodes.poll()
    assert (episodes.count, episodes.mean()) == (1, 10)
