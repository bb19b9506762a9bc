"""What every process test needs: the build under test, a place to run, addresses, and processes
that are ended whatever happens.

Fixtures
    build         Path of the build directory (BUILD, else build/)
    run_dir       a new, short-named directory: ipc paths in it fit the 107 bytes of sockaddr_un
    ipc_address   the control endpoint of a broker in run_dir
    tcp_address   the control endpoint of a broker on six free ports of 127.0.0.1
    start         start(program, *words) -> Process; a name without '/' is taken from the build
    gymnasium     the Python that has Gymnasium, as a str; skips when there is none (fails in CI)
    tensorboard   the same, of TensorBoard and matplotlib

Functions: from conftest import wait_for, free_ports, SLOW
    wait_for(condition, timeout, what) is the only way to wait.  Nothing here, and nothing in the
    tests, sleeps for a time and then hopes.
"""
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("BUILD") or ROOT / "build").resolve()
# Time-outs are multiplied by this: sanitizers cost a factor, and tests are about order, not speed.
SANITIZED = BUILD.name in ("address", "thread")
SLOW = 5 if SANITIZED else 1
# A broker's control socket and the five sockets behind it take consecutive ports.
PORTS_PER_BROKER = 6
# One test; far above what any needs, so that a hang names its test instead of stopping the suite.
TEST_S = 300
# From SIGTERM to SIGKILL at the end of a test: enough for a final checkpoint.
STOP_S = 10
POLL_S = 0.01


def wait_for(condition, timeout: float = 20, what: str = "the condition"):
    """Call condition() until it gives something true, and return that.

    timeout is in seconds on a plain build.  Past it the test fails with `what`, the last value, and
    the last exception: ConnectionError, OSError and AssertionError mean "not yet".
    """
    deadline = time.monotonic() + timeout * SLOW
    while True:
        value, problem = None, None
        try:
            value = condition()
        except (OSError, AssertionError, json.JSONDecodeError) as error:
            problem = error
        if value:
            return value
        if time.monotonic() >= deadline:
            pytest.fail(f"waited {timeout * SLOW:g} s in vain for {what}; "
                         f"last seen: {problem if problem is not None else value!r}")
        time.sleep(POLL_S)


def free_ports(count: int = PORTS_PER_BROKER) -> int:
    """The first of `count` consecutive TCP ports on 127.0.0.1 that are free now.

    Below the range that the kernel hands out by itself, so that no client's port comes in between.
    """
    for _ in range(200):
        first = random.randrange(15000, 32000, count)
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError(f"no {count} consecutive free ports found in 200 tries")


def undefined_behaviour(path: Path) -> list:
    """Lines of UndefinedBehaviorSanitizer: beside AddressSanitizer it ignores log_path."""
    if not SANITIZED:
        return []
    with open(path, "rb") as file:
        return [f"{path.name}: {line.decode(errors='replace').strip()}" for line in file
                if b": runtime error: " in line]


class Process:
    """A child in its own process group, with its output in files that outlive it."""

    def __init__(self, words: list, directory: Path, env: dict, cwd: Path):
        self.name = Path(words[0]).name
        self.command = " ".join(words)
        number = len(list(directory.glob("*.stdout")))
        self.stdout_path = directory / f"{number:03}-{self.name}.stdout"
        self.stderr_path = directory / f"{number:03}-{self.name}.stderr"
        with open(self.stdout_path, "wb") as out, open(self.stderr_path, "wb") as err:
            self.popen = subprocess.Popen(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                                           stdout=out, stderr=err, start_new_session=True)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def running(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int):
        self.popen.send_signal(number)

    def wait(self, timeout: float = 20) -> int:
        """The exit status (negative: the signal); fails with the output when it does not end."""
        try:
            return self.popen.wait(timeout * SLOW)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {timeout * SLOW:g} s: {self.report()}")

    def stop(self, timeout: float = STOP_S) -> int:
        """SIGTERM and the exit status; SIGCONT as well, for a test may have stopped it."""
        if self.running():
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
        return self.wait(timeout)

    def kill(self):
        """SIGKILL to the whole group: its own children must not outlive the test either."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()

    def report(self) -> str:
        return (f"{self.command}\nexit: {self.popen.poll()}\n"
                f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}")


@pytest.fixture(scope="session")
def build() -> Path:
    if not BUILD.is_dir():
        pytest.fail(f"{BUILD} does not exist; type make, or set BUILD")
    return BUILD


@pytest.fixture
def run_dir():
    path = Path(tempfile.mkdtemp(prefix="gq-", dir="/tmp"))
    yield path
    # What programs under the supervisor wrote to stderr lies in here.
    reports = [report for each in path.rglob("*") if each.is_file()
               for report in undefined_behaviour(each)]
    shutil.rmtree(path, ignore_errors=True)
    if reports:
        pytest.fail("\n".join(reports))


@pytest.fixture
def ipc_address(run_dir) -> str:
    return f"ipc://{run_dir}/control"


@pytest.fixture
def tcp_address() -> str:
    return f"tcp://127.0.0.1:{free_ports()}"


# Not imported here: that takes seconds, of which most tests have no use.
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None and os.environ.get("CI") != "true",
    reason="/usr/bin/python3 has no torch; type tools/setup.sh torch")


def python_with(packages: str) -> str:
    python = os.environ.get("GRADQ_PYTHON", str(ROOT / "build/venv/bin/python"))
    try:
        subprocess.run([python, "-c", f"import {packages}"], check=True, capture_output=True,
                        timeout=120)
    except (OSError, subprocess.SubprocessError):
        reason = f"{python} has no {packages}; type make venv"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return python


@pytest.fixture
def gymnasium() -> str:
    return python_with("gymnasium")


@pytest.fixture(scope="session")
def tensorboard() -> str:
    return python_with("tensorboard, matplotlib")


@pytest.fixture
def start(build, tmp_path, request):
    """start(program, *words, env={}, cwd=ROOT) -> Process.

    At the end of the test everything still running is ended, last started first, and when the
    test failed the output of every process is shown.
    """
    processes = []

    def start_process(program, *words, env: dict = None, cwd: Path = ROOT) -> Process:
        path = str(program) if "/" in str(program) else str(build / program)
        processes.append(Process([path, *map(str, words)], tmp_path,
                                   {**os.environ, **(env or {})}, cwd))
        return processes[-1]

    yield start_process
    stubborn, reports = [], []
    for process in reversed(processes):
        if process.running():
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)
            try:
                process.popen.wait(STOP_S * SLOW)
            except subprocess.TimeoutExpired:
                stubborn.append(process.command)
        process.kill()
        print(process.report())
        reports += undefined_behaviour(process.stderr_path)
    if reports:
        pytest.fail("\n".join(reports))
    if stubborn:
        pytest.fail(f"SIGTERM did not end within {STOP_S * SLOW} s: {'; '.join(stubborn)}")


@pytest.fixture(autouse=True)
def no_sanitizer_report(tmp_path_factory, monkeypatch):
    """Fail on any sanitizer's report, from any process: the supervisor's children log to files
    nobody reads, and a test that kills a process does not look at its exit status."""
    directory = tmp_path_factory.mktemp("sanitizer")
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
        before = os.environ.get(name, "")
        monkeypatch.setenv(name, f"{before}{':' if before else ''}log_path={directory}/report")
    yield
    reports = sorted(directory.iterdir())
    if reports:
        pytest.fail("\n".join(each.read_text(errors="replace")[:6000] for each in reports))


@pytest.fixture(autouse=True)
def no_hang():
    """End a test that takes too long with a traceback of where it hangs."""
    def give_up(_number, _frame):
        pytest.fail(f"still running after {TEST_S * SLOW} s")
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TEST_S * SLOW)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
