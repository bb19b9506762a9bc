"""TensorBoard's files, read back with TensorBoard's own reader: each row of the metrics is in them
once, on one axis of steps, whatever was killed meanwhile; and the curve at the end of a run.

Rows are made by hand, except in the runs at the end.  What is expected is worked out here, from the
lines of the files, by other code than the recorder's.
"""
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess

import pytest

from conftest import BUILD, ROOT, SLOW, wait_for

GRADQ = ROOT / "tools/gradq"
RECORDER = ROOT / "tools/gradq_tensorboard.py"
SEED = 11
WINDOW = 100
WAIT_S = 90
READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
print(json.dumps({tag: [[each.step, each.value, each.wall_time] for each in events.Scalars(tag)]
                  for tag in events.Tags()["scalars"]}))
"""
EPISODE = {"return": "episode/return", "length": "episode/length"}
TRAINING = {"policy_loss": "train/policy_loss", "value_loss": "train/value_loss",
            "entropy": "train/entropy", "gradient_norm": "train/gradient_norm",
            "staleness": "train/staleness", "learning_rate": "train/learning_rate",
            "steps_per_s": "train/steps_per_s"}
RUN = {"depth": "run/depth", "steps_per_s": "run/steps_per_s",
       "gradients_per_s": "run/gradients_per_s", "staleness_p50": "run/staleness_p50",
       "staleness_p99": "run/staleness_p99", "learning_rate": "run/learning_rate"}


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Rows:
    """Writes metrics of a run directory, and knows where each row belongs on the axis."""

    def __init__(self, run):
        self.metrics = run / "metrics"
        self.metrics.mkdir(exist_ok=True)
        self.lives, self.before, self.now = {}, {}, 1000.0
        self.expected = {}
        self.returns = []

    def total(self):
        return sum(self.lives.values()) + sum(self.before.values())

    def begin(self, actor):
        """A new life of this actor."""
        self.before[actor] = self.before.get(actor, 0) + self.lives.pop(actor, 0)

    def line(self, name, row):
        with open(self.metrics / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def expect(self, tag, value):
        self.expected.setdefault(tag, []).append([self.total(), float32(value), self.now])

    def episode(self, actor, steps, value, length=10):
        self.now, self.lives[actor] = self.now + 0.25, steps
        self.returns = (self.returns + [value])[-WINDOW:]
        self.expect("episode/return", value)
        self.expect("episode/length", length)
        self.expect("episode/return_mean", math.fsum(self.returns) / len(self.returns))
        self.line(f"actor-{actor}.jsonl", {
            "time": self.now, "actor": actor, "steps": steps, "episode": steps // 10,
            "return": value, "length": length, "version": 3})

    def training(self, actor, steps, **figures):
        self.now, self.lives[actor] = self.now + 0.25, steps
        for field, value in figures.items():
            if value is not None:
                self.expect(TRAINING[field], value)
        self.line(f"actor-{actor}.jsonl", {"time": self.now, "actor": actor, "steps": steps,
                                           "version": 3, "episodes": steps // 10, **figures})

    def run(self, **figures):
        self.now += 0.25
        for field, value in figures.items():
            if value is not None:
                self.expect(RUN[field], value)
        self.line("run.jsonl", {"time": self.now, "steps": 1, "version": 3, **figures})


def read_back(python, run):
    """{tag: [[step, value, wall time]]} of a run's event files."""
    answer = subprocess.run([python, "-c", READER, str(run / "tensorboard")], capture_output=True,
                            text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def same(found, expected):
    assert set(found) == set(expected)
    for tag, points in expected.items():
        assert len(found[tag]) == len(points), tag
        for one, other in zip(found[tag], points):
            assert one[0] == other[0] and one[2] == other[2], tag
            # A mean may be summed in another order.
            assert math.isclose(one[1], other[1], rel_tol=1e-6), tag


def record(python, run):
    """Write what is there, in one life of the recorder."""
    answer = subprocess.run([python, RECORDER, run, "--once"], capture_output=True, text=True,
                            timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr


def state(run):
    """Of the recorder; {} before its first."""
    try:
        return json.loads((run / "tensorboard/recorder.json").read_text())
    except FileNotFoundError:
        return {}


def has_read(run, rows):
    """Is every byte of the metrics in the recorder's state?"""
    files = (state(run).get("follower") or {}).get("files", {})
    return all(files.get(path.name, {}).get("offset") == path.stat().st_size
               for path in rows.metrics.iterdir())


# ---- values and axis ----

def test_every_row_becomes_a_point_of_each_figure_that_it_has(tensorboard, run_dir):
    rows = Rows(run_dir)
    rows.training(0, 5, policy_loss=-0.25, value_loss=12.5, entropy=0.69, gradient_norm=3.5,
                  staleness=None, steps_per_s=1234.5)
    for step in range(10, 2000, 10):
        rows.episode(step // 10 % 2, step, step / 7, length=step % 13)
    rows.training(1, 2000, policy_loss=1e-3, value_loss=0.5, entropy=0.1, gradient_norm=0.5,
                  staleness=7, steps_per_s=99.0, learning_rate=0.0025)
    rows.run(depth=17, steps_per_s=2468.0, gradients_per_s=None, staleness_p50=4, staleness_p99=9)
    record(tensorboard, run_dir)
    found = read_back(tensorboard, run_dir)
    same(found, rows.expected)
    assert "run/gradients_per_s" not in found and len(found["train/staleness"]) == 1


def test_steps_add_up_over_lives_of_actors_and_of_the_recorder(tensorboard, run_dir):
    rows = Rows(run_dir)
    rows.episode(0, 100, 1.0)
    rows.episode(1, 40, 2.0)
    rows.begin(0)  # killed and started again
    rows.episode(0, 30, 3.0)
    record(tensorboard, run_dir)
    rows.episode(1, 70, 4.0)
    for actor in (0, 1):  # up --resume
        rows.begin(actor)
    rows.training(0, 5, entropy=0.5)
    record(tensorboard, run_dir)
    # More steps than the life before had, but fewer episodes: another life all the same.
    rows.begin(1)
    rows.line("actor-1.jsonl", {"time": 2000.0, "steps": 5, "episode": 2, "return": 0, "length": 5})
    rows.line("actor-1.jsonl", {"time": 2001.0, "steps": 9, "episode": 1, "return": 0, "length": 4})
    record(tensorboard, run_dir)
    found = read_back(tensorboard, run_dir)
    assert [step for step, _, _ in found["episode/return"]] == [100, 140, 170, 200, 210, 219]
    assert [step for step, _, _ in found["train/entropy"]] == [205]
    # The mean goes on as well.
    assert math.isclose(found["episode/return_mean"][3][1], 2.5)


def test_rows_of_all_actors_are_taken_in_order_of_time_however_long_the_files_are(
        tensorboard, run_dir):
    # 256 KiB are read at once; one file alone is longer, and must not be left behind by the other.
    rows = Rows(run_dir)
    padding = "x" * 4000
    for step in range(10, 16000, 10):
        for actor in (0, 1):
            rows.now, rows.lives[actor] = rows.now + 0.25, step
            rows.expect("train/entropy", step)
            rows.line(f"actor-{actor}.jsonl", {"time": rows.now, "steps": step, "entropy": step,
                                               "more": padding if actor == 0 else ""})
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)


# ---- what is no row ----

def test_a_line_in_two_halves_counts_once_and_nonsense_never(tensorboard, run_dir):
    rows = Rows(run_dir)
    path = rows.metrics / "actor-0.jsonl"
    rows.episode(0, 10, 1.0)
    with open(path, "ab") as file:
        for line in (b"", b"nonsense", b"\xff\xfe\x00", b"[1, 2]", b"[" * 100000, b'{"time": "x"}',
                     b'{"time": NaN, "return": 1}', b'{"return": 1, "steps": 5}',
                     b'{"time": 1001, "steps": -5, "policy_loss": "high", "entropy": true}',
                     b'{"time": 1001, "steps": 1e999, "entropy": null}',
                     b'{"time": 1001, "steps": 1' + b"0" * 400 + b', "entropy": Infinity}'):
            file.write(line + b"\n")
        file.write(b'{"time": 1002, "steps": 20, "ret')
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)
    with open(path, "ab") as file:
        file.write(b'urn": 5, "length": 10}\n')
    record(tensorboard, run_dir)
    assert [point[:2] for point in read_back(tensorboard, run_dir)["episode/return"]] == [
        [10, 1.0], [20, 5.0]]


@pytest.mark.parametrize("count", [2, 10], ids=["shorter", "longer"])
def test_another_file_in_the_place_of_one_is_read_from_its_beginning(tensorboard, run_dir, count):
    rows = Rows(run_dir)
    for step in range(10, 60, 10):
        rows.episode(0, step, 1.0)
    record(tensorboard, run_dir)
    (rows.metrics / "actor-0.jsonl").unlink()
    rows.begin(0)
    for step in range(60, 60 + 10 * count, 10):
        rows.episode(0, step, 2.0)
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)


def test_of_a_file_cut_short_nothing_is_written_twice(tensorboard, run_dir):
    rows = Rows(run_dir)
    path = rows.metrics / "actor-0.jsonl"
    for step in range(10, 60, 10):
        rows.episode(0, step, 1.0)
    record(tensorboard, run_dir)
    os.truncate(path, sum(len(line) for line in path.read_bytes().splitlines(True)[:3]))
    record(tensorboard, run_dir)
    rows.episode(0, 60, 2.0)
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)


def test_a_copied_run_goes_on_where_it_was(tensorboard, run_dir):
    (run_dir / "run").mkdir()
    rows = Rows(run_dir / "run")
    rows.episode(0, 10, 1.0)
    record(tensorboard, run_dir / "run")
    shutil.copytree(run_dir / "run", run_dir / "copy")
    rows.metrics = run_dir / "copy/metrics"
    rows.episode(0, 20, 2.0)
    record(tensorboard, run_dir / "copy")
    same(read_back(tensorboard, run_dir / "copy"), rows.expected)


# ---- lives of the recorder ----

def test_it_follows_files_that_come_later_and_sigterm_ends_it_with_all_written(
        tensorboard, run_dir, start):
    recorder = start(tensorboard, RECORDER, run_dir)
    wait_for(lambda: state(run_dir), what="a state")
    rows = Rows(run_dir)  # the directory was missing so far
    rows.episode(0, 10, 1.0)
    wait_for(lambda: has_read(run_dir, rows), what="the first row")
    recorder.signal(signal.SIGSTOP)
    for step in range(20, 20000, 10):
        rows.episode(step // 10 % 3, step, step)
    assert recorder.stop() == 0
    same(read_back(tensorboard, run_dir), rows.expected)


def test_kill_9_again_and_again_neither_loses_nor_doubles_a_point(tensorboard, run_dir, start):
    print(f"seed {SEED}")
    chance, rows = random.Random(SEED), Rows(run_dir)
    for kill in range(4):
        recorder = start(tensorboard, RECORDER, run_dir)
        life = kill + 1
        wait_for(lambda: state(run_dir).get("life") == life, what=f"life {life}")
        # More than one batch, with the kill somewhere in it or in its writing.
        for step in range(1, chance.randrange(200, 4000)):
            rows.episode(kill % 2, rows.lives.get(kill % 2, 0) + 10, step)
        read = (state(run_dir).get("follower") or {}).get("files", {})
        begun = chance.random() < 0.7
        wait_for(lambda: not begun or state(run_dir)["follower"]["files"] != read,
                 what="the next batch")
        recorder.kill()
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)


@pytest.mark.parametrize("torn", [0, 5], ids=["whole", "torn"])
def test_what_was_written_but_is_in_no_state_is_written_once(tensorboard, run_dir, start, torn):
    rows = Rows(run_dir)
    rows.episode(0, 10, 1.0)
    recorder = start(tensorboard, RECORDER, run_dir)
    wait_for(lambda: has_read(run_dir, rows), what="the first row")
    before = (run_dir / "tensorboard/recorder.json").read_bytes()
    rows.episode(0, 20, 2.0)
    wait_for(lambda: has_read(run_dir, rows), what="the second row")
    recorder.kill()
    # As if it had been killed between the two writes, or within the first.
    (run_dir / "tensorboard/recorder.json").write_bytes(before)
    events = run_dir / "tensorboard" / json.loads(before)["file"]
    assert events.stat().st_size > json.loads(before)["bytes"] > 0
    os.truncate(events, events.stat().st_size - torn)
    rows.episode(0, 30, 3.0)
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)


def test_without_its_state_it_writes_all_anew(tensorboard, run_dir):
    rows = Rows(run_dir)
    rows.episode(0, 10, 1.0)
    record(tensorboard, run_dir)
    (run_dir / "tensorboard/recorder.json").write_text("{nonsense")
    foreign = run_dir / "tensorboard/somebody-elses"
    foreign.write_text("kept")
    record(tensorboard, run_dir)
    same(read_back(tensorboard, run_dir), rows.expected)
    assert foreign.read_text() == "kept"


def test_a_deleted_directory_is_made_anew_by_the_living_one(tensorboard, run_dir, start):
    rows = Rows(run_dir)
    rows.episode(0, 10, 1.0)
    recorder = start(tensorboard, RECORDER, run_dir)
    wait_for(lambda: has_read(run_dir, rows), what="the first row")
    shutil.rmtree(run_dir / "tensorboard")
    wait_for(lambda: has_read(run_dir, rows), what="the first row again")
    assert recorder.stop() == 0
    same(read_back(tensorboard, run_dir), rows.expected)


def test_two_recorders_do_not_write_at_once(tensorboard, run_dir, start):
    rows = Rows(run_dir)
    rows.episode(0, 10, 1.0)
    first = start(tensorboard, RECORDER, run_dir)
    wait_for(lambda: has_read(run_dir, rows), what="the first row")
    answer = subprocess.run([tensorboard, RECORDER, run_dir, "--once"], capture_output=True,
                            text=True, timeout=60, check=False)
    assert answer.returncode == 1 and "the recorder of a living run writes it" in answer.stderr
    second = start(tensorboard, RECORDER, run_dir)
    assert first.stop() == 0
    wait_for(lambda: state(run_dir)["life"] == 2, what="the second one's turn")
    assert second.stop() == 0
    same(read_back(tensorboard, run_dir), rows.expected)


# ---- real runs ----

def up_words(run, *words):
    return ["up", "--run", run, "--build", BUILD, "--seed", SEED, "--actors", 2, *words]


def gradq(*words, env=None):
    return subprocess.run([str(word) for word in (GRADQ, *words)], capture_output=True, text=True,
                          timeout=WAIT_S * SLOW, check=False, stdin=subprocess.DEVNULL,
                          env={**os.environ, **(env or {})})


def lines(path):
    """Rows of a file, of those that it may have."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recorder_of(run):
    """The recorder's row of `status`."""
    rows = json.loads(gradq("status", "--run", run, "--json").stdout)["processes"]
    return next((row for row in rows if row["name"] == "recorder"), None)


def points_of(run):
    """{tag: values} that the files of a run give, in no order; and its steps over all lives."""
    expected, total = {}, 0
    for path in (run / "metrics").iterdir():
        before = 0
        for row in lines(path):
            kind = RUN if path.name == "run.jsonl" else EPISODE if "return" in row else TRAINING
            for field, tag in kind.items():
                if row.get(field) is not None:
                    expected.setdefault(tag, []).append(float32(row[field]))
            if kind is not RUN:
                total += row["steps"] - before if row["steps"] >= before else row["steps"]
                before = row["steps"]
    return expected, total


def check_run(python, run):
    record(python, run)  # on a busy machine a few rows may be left
    found, (expected, total) = read_back(python, run), points_of(run)
    assert len(found.pop("episode/return_mean")) == len(expected["episode/return"])
    assert {tag: sorted(value for _, value, _ in points) for tag, points in found.items()} == {
        tag: sorted(values) for tag, values in expected.items()}
    for points in found.values():
        steps = [step for step, _, _ in points]
        assert steps == sorted(steps)
    assert max(points[-1][0] for points in found.values()) == total
    return set(found), total


def test_a_real_run_its_killed_recorder_and_its_resumption(tensorboard, run_dir, start):
    run = run_dir / "run"
    print(f"seed {SEED}")
    child = start(GRADQ, *up_words(run))
    wait_for(lambda: "address: " in child.stdout, WAIT_S, "the start")
    wait_for(lambda: state(run).get("bytes", 0) > 1000, WAIT_S, "points")
    os.kill(recorder_of(run)["pid"], signal.SIGKILL)
    wait_for(lambda: state(run)["life"] >= 2, WAIT_S, "the recorder's return")
    wait_for(lambda: any(row["depth"] is not None and row["gradients_per_s"] is not None
                         for row in lines(run / "metrics/run.jsonl")[1:]), WAIT_S, "a depth")
    assert child.stop(30) == 0
    tags, total = check_run(tensorboard, run)
    assert {*EPISODE.values(), *RUN.values()} <= tags
    assert "episodes, " in child.stdout and "return " in child.stdout
    assert (run / "summary.png").read_bytes().startswith(b"\x89PNG\r\n")

    answer = gradq("up", "--run", run, "--build", BUILD, "--resume", "--max-steps", 2000)
    assert answer.returncode == 0, answer.stderr
    assert check_run(tensorboard, run)[1] >= total + 2000


def builds(place):
    """A build directory without a venv, and a PATH whose python3 has nothing."""
    build, path = place / "b/build", place / "path"
    build.mkdir(parents=True)
    path.mkdir()
    for name in ("broker", "optimizer", "actor", "top", "try"):
        (build / f"gradq-{name}").symlink_to(BUILD / f"gradq-{name}")
    (build / "plugins").symlink_to(BUILD / "plugins")
    script(path / "python3", "exit 1")
    return build, {"PATH": f"{path}:{os.environ['PATH']}", "GRADQ_PYTHON": str(path / "python3")}


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_the_packages_one_line_says_how_to_get_them_and_the_run_goes_on(run_dir):
    run = run_dir / "run"
    build, env = builds(run_dir)
    words = up_words(run, "--build", build, "--max-steps", 2000)
    answer = gradq(*words, env=env)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("make venv") == 1 and "no picture" in answer.stderr
    assert "▁" in answer.stdout and "episodes, " in answer.stdout
    assert not (run / "tensorboard").exists() and not (run / "summary.png").exists()
    answer = gradq(*words, "--tensorboard", env=env)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("make venv") == 2 and "no TensorBoard files" in answer.stderr


@pytest.mark.parametrize("code", [3, 78])
def test_a_recorder_that_fails_ends_no_run(run_dir, code):
    run = run_dir / "run"
    build, env = builds(run_dir)
    # It says that it has every package.
    script(run_dir / "path/python3", f'test "$1" = -c && exit 0\necho failed; exit {code}')
    answer = gradq(*up_words(run, "--build", build, "--max-steps", 2000), env=env)
    assert answer.returncode == 0, answer.stderr
    assert "done: " in answer.stdout
    assert "failed" in (run / "log/recorder.out").read_text()


def test_a_run_that_ends_before_the_recorder_is_up_is_recorded(tensorboard, run_dir):
    run = run_dir / "run"
    build, env = builds(run_dir)
    # A Python that is up only when the actor has ended.  No shell: dash takes every signal again.
    log = run / "log/actor-0.jsonl"
    (run_dir / "path/python3").write_text(
        "#!/usr/bin/python3\nimport os, pathlib, sys, time\n"
        f"log, real = pathlib.Path({str(log)!r}), {tensorboard!r}\n"
        "if sys.argv[1] != '-c':\n"
        "    while not log.exists() or 'stopped' not in log.read_text():\n"
        "        time.sleep(0.01)\n"
        "    os.execv(real, [real, *sys.argv[1:]])\n")
    answer = gradq(*up_words(run, "--build", build, "--max-steps", 500), env=env)
    assert answer.returncode == 0, answer.stderr
    assert state(run).get("life") == 1
    check_run(tensorboard, run)


def test_no_tensorboard_switches_it_off_and_resume_remembers(tensorboard, run_dir):
    run = run_dir / "run"
    answer = gradq(*up_words(run, "--no-tensorboard", "--max-steps", 500))
    assert answer.returncode == 0 and "TensorBoard" not in answer.stderr, answer.stderr
    answer = gradq("up", "--run", run, "--build", BUILD, "--resume", "--max-steps", 500)
    assert answer.returncode == 0 and not (run / "tensorboard").exists()
    answer = gradq("up", "--run", run, "--build", BUILD, "--resume", "--max-steps", 500,
                   "--tensorboard")
    assert answer.returncode == 0
    assert state(run)["life"] == 1
    check_run(tensorboard, run)


# ---- the curve ----

def test_plot_tells_the_figures_of_a_run_and_draws_it(tensorboard, run_dir):
    rows = Rows(run_dir)
    (run_dir / "settings.json").write_text(json.dumps({"seed": 5}))
    for episode in range(1, 301):  # 0.25 s and 10 steps each
        if episode == 151:  # the run was down for an hour
            rows.begin(0)
            rows.now += 3600
        rows.episode(0, 10 * (episode if episode < 151 else episode - 150),
                     min(episode, 200) if episode < 290 else 0)
    answer = gradq("plot", "--run", run_dir, "--out", run_dir / "curve.png")
    assert answer.returncode == 0, answer.stderr
    # Of episodes 190 to 289: 190..199, then 200 for 90; of the last hundred, 11 are 0.
    best, last = (sum(range(190, 200)) + 90 * 200) / 100, 89 * 200 / 100
    assert (f"300 episodes, 3,000 steps, {298 * 0.25:,.1f} s of training, 40 steps/s; mean return "
            f"of 100 episodes: best {best:.1f}, last {last:.1f}") in answer.stdout
    spark = answer.stdout.splitlines()[1].split()[1]
    assert len(spark) == 60 and spark[0] == "▁" and "█" in spark and spark[-1] != "█"
    rising = spark[:50]
    assert sorted(rising) == list(rising)
    count = subprocess.run(
        [tensorboard, "-c", "import sys, matplotlib.image as m; p = m.imread(sys.argv[1])[..., :3];"
         "print(((p - [0.122, 0.467, 0.706]).__abs__().max(axis=2) < 0.02).sum(), *p.shape)",
         str(run_dir / "curve.png")], capture_output=True, text=True, timeout=60, check=True)
    line, height, width = [int(word) for word in count.stdout.split()[:3]]
    assert height > 400 and width > 600 and line > width  # the line crosses two panels


def test_plot_says_so_when_there_is_nothing_to_draw(run_dir):
    (run_dir / "settings.json").write_text("{}")
    (run_dir / "metrics").mkdir()
    answer = gradq("plot", "--run", run_dir)
    assert answer.returncode == 1 and "no episode has ended yet" in answer.stderr
    assert not (run_dir / "summary.png").exists()
