"""gradq-bench as a process: its figures fit together, and it leaves nothing behind.

No test here asserts a speed: rates belong to a machine and to what else it does.

Run from the root of the tree, after `make`:  /usr/bin/python3 -m pytest tests/process/test_bench.py
BUILD names another directory of binaries.
"""
import json
import os
import signal
from pathlib import Path

import pytest
from conftest import wait_for

QUICK = ["--seconds", "0.1", "--params", "1000"]
# Long enough to be met in the middle of its loop, whatever else the machine does.
SLOW_LOOP = ["--seconds", "1", "--params", "1000", "--actors", "2"]
RUN_S = 100
COLUMNS = ["params", "actors", "lane", "window", "loop_per_s", "no_journal", "kernel_per_s",
           "ratio", "zmq_1hop_per_s", "zmq_2hop_per_s", "ratio_2hop", "p50_us", "p99_us"]
# Printed with three digits after the point.
HALF_A_DIGIT = 0.0005


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> list:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def services(bench) -> dict:
    """Name -> pid of the broker and optimizer that this bench started and that run now."""
    pids = []
    for task in Path(f"/proc/{bench.pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    found = {command_line(pid)[0]: pid for pid in pids if command_line(pid)}
    return found if {"gradq-broker", "gradq-optimizer"} <= found.keys() else {}


def directory_of(pids: dict) -> Path:
    words = command_line(pids["gradq-optimizer"])
    return Path(words[words.index("--run") + 1]).parent


@pytest.fixture
def in_its_loop(start):
    """A bench whose broker and optimizer run: (process, their pids, their directory)."""
    bench = start("gradq-bench", *SLOW_LOOP)
    pids = wait_for(lambda: services(bench), RUN_S, "broker and optimizer of the bench")
    directory = directory_of(pids)
    assert directory.is_dir()
    return bench, pids, directory


def gone(pids: dict) -> bool:
    return not any(alive(pid) for pid in pids.values())


def test_a_json_line_a_point_whose_ratios_follow_from_its_rates(start):
    bench = start("gradq-bench", *QUICK, "--params", "2e3", "--actors", "1", "--actors", "2",
                  "--window", "3", "--optimizer", "lion", "--json")
    assert bench.wait(RUN_S) == 0
    rows = [json.loads(line) for line in bench.stdout.splitlines()]
    assert [(row["params"], row["actors"]) for row in rows] == [(1000, 1), (1000, 2), (2000, 1),
                                                                (2000, 2)]
    for row in rows:
        assert row["lane"] == "inline" and row["window"] == 3 and row["journal"] is True
        assert row["optimizer"] == "lion" and row["cores"] >= 1 and row["machine"] and row["cpu"]
        for name in ("loop_per_s", "kernel_per_s", "zmq_1hop_per_s", "zmq_2hop_per_s",
                     "zmq_2hop_tight_per_s", "zmq_echo_per_s", "zmq_small_p50_us",
                     "kernel_gb_per_s", "triad_gb_per_s", "p50_us"):
            assert row[name] > 0, name
        assert row["versions_per_s"] >= 0 and row["seen_per_s"] >= 0
        assert row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["ratio"] == pytest.approx(row["loop_per_s"] / row["kernel_per_s"])
        assert row["journal_ratio"] == pytest.approx(row["loop_per_s"] / row["unjournaled_per_s"])
        assert row["ratio_2hop"] == pytest.approx(row["loop_per_s"] / row["zmq_2hop_per_s"])
        assert row["loop_per_s"] == pytest.approx(row["gradients"] / row["seconds"])
        # Lion reads weights, gradient and momentum, and writes weights and momentum: 4 bytes each.
        assert row["kernel_gb_per_s"] == pytest.approx(
            row["kernel_per_s"] * row["params"] * 20 / 1e9)


def test_the_table_names_machine_command_and_columns(start):
    bench = start("gradq-bench", *QUICK, "--actors", "1")
    assert bench.wait(RUN_S) == 0
    machine, command, names, row = bench.stdout.splitlines()
    assert machine.startswith("# ") and "cores" in machine and "GB/s" in machine
    assert command == f"# gradq-bench {' '.join(QUICK)} --actors 1"
    assert names.split() == COLUMNS
    values = dict(zip(COLUMNS, row.split(), strict=True))
    assert (values["params"], values["actors"], values["lane"]) == ("1000", "1", "inline")
    ratio = float(values["loop_per_s"]) / float(values["kernel_per_s"])
    assert float(values["ratio"]) == pytest.approx(ratio, abs=2 * HALF_A_DIGIT)


def test_settings_of_the_environment_do_not_reach_the_loop(start):
    # Four gradients a step with a window of one each would wait for ever.
    bench = start("gradq-bench", *QUICK, "--actors", "1", "--window", "1", "--json",
                  env={"GRADQ_AGGREGATE": "4"})
    assert bench.wait(RUN_S) == 0
    assert json.loads(bench.stdout)["gradients"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_processes_or_files_left(in_its_loop, number):
    bench, pids, directory = in_its_loop
    bench.signal(number)
    assert bench.wait() == 1
    assert bench.stderr == "gradq-bench: interrupted\n"
    assert gone(pids) and not directory.exists()


def test_a_killed_bench_takes_its_processes_along(in_its_loop):
    bench, pids, directory = in_its_loop
    bench.signal(signal.SIGKILL)
    assert bench.wait() == -signal.SIGKILL
    wait_for(lambda: gone(pids), what="broker and optimizer to end")
    for path in sorted(directory.rglob("*"), reverse=True):  # nobody else is left to do it
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


@pytest.mark.parametrize("victim", ["gradq-broker", "gradq-optimizer"])
def test_a_process_that_dies_is_named_and_there_is_no_rate(in_its_loop, victim):
    bench, pids, directory = in_its_loop
    os.kill(pids[victim], signal.SIGKILL)
    assert bench.wait(RUN_S) == 1
    assert f"{victim} ended by itself (signal 9)" in bench.stderr
    assert all(line.startswith("#") for line in bench.stdout.splitlines())
    assert gone(pids) and not directory.exists()


@pytest.mark.parametrize("words, status, text", [
    (["--params", "0"], 2, "--params takes a whole number"),
    (["--params", "1.5"], 2, "--params takes a whole number"),
    (["--actors", "many"], 2, "--actors takes a whole number"),
    (["--optimizer", "sdg"], 78, "no update rule"),
    (["--set", "lrr=1"], 78, "did you mean lr"),
    (["--lane", "pigeon"], 2, "inline"),
])
def test_a_wrong_word_is_named_before_anything_is_measured(start, words, status, text):
    bench = start("gradq-bench", *words)
    assert bench.wait() == status
    assert text in bench.stderr and bench.stdout == ""
