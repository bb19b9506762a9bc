"""gradq-top as a process: against a stand-in broker that answers what the test says.

Run from the root of the tree, after `make`:  /usr/bin/python3 -m pytest tests/process/test_top.py
BUILD names another directory of binaries.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import tempfile
import termios
import threading
import time

import pytest
import zmq

TOP = os.path.join(os.environ.get("BUILD", "build"), "gradq-top")
WAIT_S = 20

ACTORS = [{"id": 0, "state": "alive", "pushed": 9, "acknowledged": 8, "resent": 0, "received": 9,
           "return_mean": 21.5, "last_seen_ms": 12},
          {"id": 3, "state": "silent", "pushed": 4, "acknowledged": 4, "resent": 1, "received": 4,
           "return_mean": None, "last_seen_ms": 8000}]


class Broker:
    """A ROUTER that answers stats; `received` rises by 10 an answer."""

    def __init__(self, address):
        self.address, self.depth, self.asked, self.over = address, 5, 0, threading.Event()
        self.answer, self.quiet = None, False
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        assert self.ready.wait(WAIT_S)

    def serve(self):
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.address)
        self.ready.set()
        while not self.over.is_set():
            if not router.poll(20):
                continue
            who, message = router.recv_multipart()
            assert json.loads(message)["op"] == "stats"
            self.asked += 1
            if not self.quiet:
                router.send_multipart([who, self.answer or json.dumps(self.stats()).encode()])
        router.close()
        context.term()

    def stats(self):
        received = 10 * self.asked
        return {"op": "stats", "ok": True, "address": self.address,
                "uptime_ms": 1000,
                "queue": {"depth": self.depth, "capacity": 10, "bytes": 640,
                          "bytes_capacity": 1 << 28, "received": received,
                          "delivered": received - self.depth, "refused": 0, "malformed": 0},
                "relay": {"weights": 1, "acks": 1, "subscribers": 2},
                "optimizer": {"state": "alive", "run": "ab" * 16, "name": "adam",
                              "version": 7, "term": 1,
                              "applied": 7, "rejected": 0, "rejected_by": {}, "duplicates": 0,
                              "lsn": 9, "staleness_p50": 1, "staleness_p99": 4,
                              "apply_us_p50": 12, "last_seen_ms": 3},
                "actors": ACTORS}

    def stop(self):
        self.over.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="gq-", dir="/tmp") as directory:
        yield directory


@pytest.fixture
def broker(place):
    one = Broker(f"ipc://{place}/control")
    yield one
    one.stop()


def top(*words, **more):
    return subprocess.run([TOP, *words], capture_output=True, text=True, timeout=WAIT_S,
                          stdin=subprocess.DEVNULL, check=False, **more)


@contextlib.contextmanager
def running(*words):
    with subprocess.Popen([TOP, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as child:
        alarm = threading.Timer(WAIT_S, child.kill)
        alarm.start()
        try:
            yield child
        finally:
            alarm.cancel()
            child.kill()
            child.stdout.close()
            child.stderr.close()


def test_once_json_is_one_object_with_the_fields_of_the_contract(broker):
    answer = top("--address", broker.address, "--once", "--json")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("\n") == 1
    stats = json.loads(answer.stdout)
    assert {"depth", "capacity", "bytes", "received", "delivered", "refused"} <= set(stats["queue"])
    assert {"name", "version", "applied", "rejected", "duplicates", "staleness_p50",
            "staleness_p99", "apply_us_p50"} <= set(stats["optimizer"])
    assert stats["actors"] == ACTORS
    assert abs(stats["time"] - time.time()) < WAIT_S
    assert "in_per_s" not in stats  # one answer has no rate


def test_json_carries_rates_from_the_second_object_on(broker):
    with running("--address", broker.address, "--json", "--interval-ms", "50") as child:
        first, second = (json.loads(child.stdout.readline()) for _ in range(2))
    assert "in_per_s" not in first
    passed = second["time"] - first["time"]
    # Both clocks are read within the same microseconds; 5 % is room for a step of the wall clock.
    assert second["in_per_s"] == pytest.approx(10 / passed, rel=0.05)
    assert second["out_per_s"] == pytest.approx(10 / passed, rel=0.05)


def test_once_looks_twice_for_people_and_shows_rates(broker):
    answer = top("--address", broker.address, "--once", "--interval-ms", "50")
    assert answer.returncode == 0, answer.stderr
    assert broker.asked == 2
    assert re.search(r"rates +in [0-9.]+k?/s +out [0-9.]+k?/s", answer.stdout), answer.stdout


def test_the_address_comes_from_the_run_directory(broker, place):
    with open(os.path.join(place, "address"), "w", encoding="utf-8") as file:
        file.write(broker.address + "\n")
    assert top("--run", place, "--once", "--json").returncode == 0
    assert broker.asked == 1


@pytest.mark.parametrize("words", [["--once"], ["--once", "--json"]])
def test_once_exits_69_and_says_so_when_no_broker_answers(place, words):
    answer = top("--address", f"ipc://{place}/control", "--wait-ms", "100", *words)
    assert answer.returncode == 69
    assert answer.stdout == "" and "did not answer" in answer.stderr


def test_once_exits_69_when_the_run_directory_holds_no_run(place):
    answer = top("--run", place, "--once")
    assert answer.returncode == 69
    assert "tools/gradq up" in answer.stderr


@pytest.mark.parametrize("bytes_", [b"", b"nonsense", b"[]", b"{}", b'{"ok": false}',
                                    b'{"queue": 1}', b"\xff\xfe", b"[" * 100000])
def test_a_broker_that_answers_nonsense_ends_once_with_a_sentence(broker, bytes_):
    broker.answer = bytes_ or b"\0"
    answer = top("--address", broker.address, "--once", "--json")
    assert answer.returncode == 1
    assert answer.stdout == "" and answer.stderr.startswith("gradq-top: ")


@pytest.mark.parametrize("words", [["--once", "--jsn"], ["--once", "--address", "nowhere"]])
def test_a_wrong_word_exits_2(words):
    answer = top(*words)
    assert answer.returncode == 2
    assert answer.stderr


def test_json_tells_of_a_silent_broker_and_goes_on_when_it_returns(place):
    address = f"ipc://{place}/control"
    with running("--address", address, "--json", "--interval-ms", "50", "--wait-ms",
                 "50") as child:
        silent = json.loads(child.stdout.readline())
        assert silent["silent_s"] >= 0 and address in silent["error"] and "queue" not in silent
        broker = Broker(address)
        try:
            for line in child.stdout:
                if "queue" in json.loads(line):
                    break
            else:
                pytest.fail("it never found the broker that came back")
        finally:
            broker.stop()


def test_stat_repeats_its_header_every_20_rows(broker):
    with running("--address", broker.address, "--stat", "--interval-ms", "50") as child:
        lines = [child.stdout.readline() for _ in range(24)]
    heads = [at for at, line in enumerate(lines) if "depth" in line]
    assert heads == [1, 23]


@pytest.mark.parametrize("limit, code", [("4", 1), ("5", 0)])
def test_fail_above_exits_1_only_when_the_depth_exceeds_it(broker, limit, code):
    answer = top("--address", broker.address, "--once", "--json", "--fail-above", limit)
    assert answer.returncode == code
    assert json.loads(answer.stdout)["queue"]["depth"] == 5
    assert ("above 4" in answer.stderr) == bool(code)


def test_fail_above_ends_a_continuous_report_as_soon_as_the_queue_fills(broker):
    with running("--address", broker.address, "--json", "--interval-ms", "50", "--fail-above",
                 "8") as child:
        assert json.loads(child.stdout.readline())["queue"]["depth"] == 5
        broker.depth = 9
        assert child.wait(WAIT_S) == 1


def test_without_a_terminal_it_prints_rows(broker):
    with running("--address", broker.address, "--interval-ms", "50") as child:
        assert "queue" in child.stdout.readline()


@pytest.mark.parametrize("locale, bar", [("C.UTF-8", "█"), ("C", "#")])
def test_the_bar_is_unicode_only_where_the_locale_is(broker, locale, bar):
    answer = top("--address", broker.address, "--once", env={**os.environ, "LC_ALL": locale})
    assert answer.returncode == 0
    assert bar in answer.stdout
    assert "\033" not in answer.stdout  # not a terminal


# ---- the screen ----

class Screen:
    """gradq-top on a terminal of its own."""

    def __init__(self, address, rows=30, columns=100, **environment):
        self.terminal, inner = pty.openpty()
        self.inner = inner
        self.resize(rows, columns, None)
        self.before = termios.tcgetattr(inner)
        self.seen = b""
        self.child = subprocess.Popen(
            [TOP, "--address", address, "--interval-ms", "50", "--wait-ms", "200"], stdin=inner,
            stdout=inner, stderr=inner, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment})

    def resize(self, rows, columns, child):
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if child:
            child.send_signal(signal.SIGWINCH)

    def read(self, wait_s):
        if select.select([self.terminal], [], [], wait_s)[0]:
            self.seen += os.read(self.terminal, 65536)

    def until(self, text, start=0):
        deadline = time.monotonic() + WAIT_S
        while text.encode() not in self.seen[start:]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen[start:]!r}"
            self.read(0.1)

    def end(self):
        """Wait for the exit; what was printed, and the terminal's modes, are as before?"""
        deadline = time.monotonic() + WAIT_S
        while self.child.poll() is None:
            assert time.monotonic() < deadline, "gradq-top does not end"
            self.read(0.1)
        self.read(0.1)
        assert termios.tcgetattr(self.inner) == self.before
        assert self.seen.rstrip().endswith(b"\033[?25h\033[?1049l")
        return self.child.returncode

    def close(self):
        self.child.kill()
        self.child.wait()
        os.close(self.terminal)
        os.close(self.inner)


@pytest.fixture
def screen(request, broker):
    one = Screen(broker.address, **getattr(request, "param", {}))
    yield one
    one.close()


def test_the_screen_shows_depth_rates_drain_time_staleness_and_marks_silent_actors(screen):
    screen.until("\033[?1049h")
    for text in ("5/10", "drains in", "staleness p50 1  p99 4", "!     3 silent"):
        screen.until(text)
    os.write(screen.terminal, b"q")
    assert screen.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_screen_and_restores_the_terminal(screen, number):
    screen.until("5/10")
    screen.child.send_signal(number)
    assert screen.end() == 0


def test_control_c_ends_the_screen_and_restores_the_terminal(screen):
    screen.until("5/10")
    os.write(screen.terminal, b"\x03")
    assert screen.end() == 0


def test_a_crash_restores_the_terminal(screen):
    screen.until("5/10")
    screen.child.send_signal(signal.SIGABRT)
    assert screen.end() == -signal.SIGABRT


def test_control_z_gives_the_terminal_back_until_it_continues(screen):
    screen.until("5/10")
    screen.child.send_signal(signal.SIGTSTP)
    screen.until("\033[?1049l")
    deadline = time.monotonic() + WAIT_S
    while b"State:\tT" not in open(f"/proc/{screen.child.pid}/status", "rb").read():
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.02)
    assert termios.tcgetattr(screen.inner) == screen.before
    at = len(screen.seen)
    screen.child.send_signal(signal.SIGCONT)
    screen.until("5/10", at)
    os.write(screen.terminal, b"q")
    assert screen.end() == 0


def test_a_silent_broker_is_named_on_the_screen_and_q_still_quits(screen, broker):
    screen.until("5/10")
    broker.quiet = True
    screen.until("broker silent for")
    os.write(screen.terminal, b"q")
    assert screen.end() == 0


@pytest.mark.parametrize("screen", [{"NO_COLOR": "1"}], indirect=True)
def test_no_color_prints_no_colour(screen):
    screen.until("5/10")
    os.write(screen.terminal, b"q")
    assert screen.end() == 0
    assert not re.search(rb"\033\[[1-9][0-9;]*m", screen.seen)


def test_after_a_resize_no_line_is_wider_than_the_terminal(screen):
    screen.until("5/10")
    screen.resize(8, 30, screen.child)
    at = len(screen.seen)
    # The second whole drawing after the signal is in the new size for certain.
    deadline = time.monotonic() + WAIT_S
    while screen.seen[at:].count(b"\033[J") < 3:
        assert time.monotonic() < deadline
        screen.read(0.1)
    drawing = screen.seen[at:].split(b"\033[J")[2].decode()
    lines = re.sub(r"\033\[[0-9;?]*[a-zA-Z]", "", drawing).split("\r\n")
    assert len(lines) <= 8
    assert max(len(line) for line in lines) <= 30
