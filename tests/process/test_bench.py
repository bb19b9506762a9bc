"""gradq-bench as a process: its figures fit together, and it leaves nothing behind.

No test here asserts a speed: rates belong to a machine and to what else it does.

Run from the root of the tree, after `make`:  /usr/bin/python3 -m pytest tests/process/test_bench.py
BUILD names another directory of binaries.
"""
import json
import os
import re
import signal
from pathlib import Path

import pytest
from conftest import wait_for

QUICK = ["--seconds", "0.1", "--params", "1000", "--lane", "inline"]
# Long enough to be met in the middle of its loop, whatever else the machine does.
SLOW_LOOP = ["--seconds", "1", "--params", "1000", "--actors", "2", "--lane", "inline"]
RUN_S = 100
COLUMNS = ["params", "actors", "window", "lane", "journal", "loop_per_s", "no_journal",
           "kernel_per_s", "ratio", "zmq_round_per_s", "ratio_2hop", "zmq_rule_per_s", "ratio_rule",
           "zmq_echo_per_s", "p50_us", "p99_us", "slowest_share", "rss_mb"]
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


def rows_of(bench) -> list:
    assert bench.wait(RUN_S) == 0, bench.stderr
    return [json.loads(line) for line in bench.stdout.splitlines()]


def test_a_json_line_a_point_whose_ratios_follow_from_its_rates(start):
    rows = rows_of(start("gradq-bench", *QUICK, "--params", "2e3", "--actors", "1", "--actors", "2",
                         "--window", "3", "--optimizer", "lion", "--json"))
    assert [(row["params"], row["actors"]) for row in rows] == [(1000, 1), (1000, 2), (2000, 1),
                                                                (2000, 2)]
    for row in rows:
        assert (row["lane"], row["window"], row["journal"]) == ("inline", 3, "recycle")
        assert row["optimizer"] == "lion" and row["cores"] >= 1 and row["machine"] and row["cpu"]
        assert row["transport"] == "ipc" and row["encoding"] == "f32"
        for name in ("loop_per_s", "unjournaled_per_s", "kernel_per_s", "zmq_1hop_per_s",
                     "zmq_2hop_per_s", "zmq_2hop_tight_per_s", "zmq_round_per_s", "zmq_rule_per_s",
                     "zmq_echo_per_s", "zmq_round_p50_us", "zmq_echo_p50_us", "zmq_small_p50_us",
                     "kernel_gb_per_s", "triad_gb_per_s", "triad_cache_gb_per_s", "p50_us",
                     "broker_rss_mb", "optimizer_rss_mb"):
            assert row[name] > 0, name
        assert row["versions_per_s"] >= 0 and row["seen_per_s"] >= 0 and row["load"] >= 0
        assert row["p50_us"] <= row["p99_us"] <= row["max_us"]
        assert row["kernel_per_s"] <= row["kernel_best_per_s"]
        for ratio, limit in (("ratio", "kernel_per_s"), ("journal_ratio", "unjournaled_per_s"),
                             ("ratio_2hop", "zmq_round_per_s"), ("ratio_rule", "zmq_rule_per_s"),
                             ("ratio_echo", "zmq_echo_per_s"),
                             ("ratio_2hop_one_way", "zmq_2hop_per_s")):
            assert row[ratio] == pytest.approx(row["loop_per_s"] / row[limit]), ratio
        assert row["loop_per_s"] == pytest.approx(row["gradients"] / row["seconds"])
        assert 0 <= row["slowest_share"] <= 1
        assert row["actors"] > 1 or row["slowest_share"] == 1
        assert row["rss_mb"] == pytest.approx(row["broker_rss_mb"] + row["optimizer_rss_mb"])
        # Lion reads weights, gradient and momentum, and writes weights and momentum: 4 bytes each.
        assert row["kernel_gb_per_s"] == pytest.approx(
            row["kernel_per_s"] * row["params"] * 20 / 1e9)


def test_rows_say_how_gradients_were_encoded(start):
    row, = rows_of(start("gradq-bench", *QUICK, "--actors", "1", "--encoding", "bf16", "--json"))
    assert (row["lane"], row["encoding"]) == ("inline", "bf16") and row["loop_per_s"] > 0


def test_rows_for_each_window_and_journal(start):
    rows = rows_of(start("gradq-bench", *QUICK, "--actors", "2", "--window", "1", "--window", "4",
                         "--journal", "off", "--journal", "recycle", "--json"))
    assert [(row["window"], row["journal"]) for row in rows] == [
        (1, "off"), (1, "recycle"), (4, "off"), (4, "recycle")]
    for off, on in zip(rows[::2], rows[1::2]):
        assert off["loop_per_s"] == off["unjournaled_per_s"] == on["unjournaled_per_s"]
        assert off["journal_ratio"] == 1 and on["loop_per_s"] != off["loop_per_s"]
        # Raw ZeroMQ is measured once for both.
        assert off["zmq_round_per_s"] == on["zmq_round_per_s"]


def test_the_table_names_machine_command_and_columns(start):
    bench = start("gradq-bench", *QUICK, "--actors", "1")
    assert bench.wait(RUN_S) == 0
    machine, command, meaning, names, row = bench.stdout.splitlines()
    assert machine.startswith("# ") and "cores" in machine and "GB/s" in machine
    assert command == f"# gradq-bench {' '.join(QUICK)} --actors 1"
    assert meaning.startswith("# ")
    assert names.split() == COLUMNS and len(names) == len(row)
    values = dict(zip(COLUMNS, row.split(), strict=True))
    assert (values["params"], values["actors"], values["lane"]) == ("1000", "1", "inline")
    ratio = float(values["loop_per_s"]) / float(values["kernel_per_s"])
    assert float(values["ratio"]) == pytest.approx(ratio, abs=2 * HALF_A_DIGIT)


def tcp_ports(pid: int) -> set:
    """Ports of 127.0.0.1 on which the process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except FileNotFoundError:
            pass
    ports = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            ports.add(int(words[1].split(":")[1], 16))
    return ports


def test_over_tcp_the_broker_listens_on_ports(start):
    bench = start("gradq-bench", *SLOW_LOOP, "--transport", "tcp", "--json")
    pids = wait_for(lambda: services(bench), RUN_S, "broker and optimizer of the bench")
    ports = wait_for(lambda: tcp_ports(pids["gradq-broker"]), RUN_S, "ports of the broker")
    assert f"tcp://127.0.0.1:{min(ports)}" in command_line(pids["gradq-optimizer"])
    row, = rows_of(bench)
    assert row["transport"] == "tcp" and row["loop_per_s"] > 0 and row["zmq_round_per_s"] > 0


def test_a_size_that_memory_does_not_hold_is_told_and_the_rest_goes_on(start):
    available = int(re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())[1])
    # One actor needs more than 16 frames.
    params = available * 1024 // (4 * 16)
    if params > 2**31:
        pytest.skip("this machine has the memory for the largest vector")
    words = ["--seconds", "0.05", "--lane", "inline", "--actors", "1", "--params", params]
    rows = rows_of(start("gradq-bench", *words, "--params", "1000", "--json"))
    assert [(row["params"], row["loop_per_s"] is None) for row in rows] == [(params, True),
                                                                            (1000, False)]
    assert rows[0]["not_available"].startswith("about") and "not_available" not in rows[1]

    alone = start("gradq-bench", *words)
    assert alone.wait(RUN_S) == 1
    assert "nothing could be measured: about" in alone.stderr
    assert f"{params}      1      2 inline recycle not available: about" in alone.stdout


def test_each_lane_has_its_row_whether_it_is_to_be_had_or_not(start):
    rows = rows_of(start("gradq-bench", "--seconds", "0.1", "--params", "1000", "--actors", "1",
                         "--lane", "shm", "--lane", "inline", "--json"))
    assert [row["lane"] for row in rows] == ["shm", "inline"]
    assert rows[0]["not_available"] if rows[0]["loop_per_s"] is None else rows[0]["loop_per_s"] > 0
    assert rows[1]["loop_per_s"] > 0


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
    (["--window", "65"], 2, "--window takes a whole number from 1 to 64"),
    (["--journal", "maybe"], 2, "--journal takes recycle, keep or off"),
    (["--transport", "udp"], 2, "ipc"),
    (["--optimizer", "sdg"], 78, "no update rule"),
    (["--set", "lrr=1"], 78, "did you mean lr"),
    (["--lane", "pigeon"], 2, "--lane takes inline, shm or auto"),
])
def test_a_wrong_word_is_named_before_anything_is_measured(start, words, status, text):
    bench = start("gradq-bench", *words)
    assert bench.wait() == status
    assert text in bench.stderr and bench.stdout == ""
