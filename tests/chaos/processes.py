"""Processes that are killed, stopped and started again, and a cable between two of them to cut."""
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

# Between two cuts.  TCP waits after an outage for as long again, and is not heard in between: a
# link that comes up for moments only is one long outage to it.
UP_S = 3.5


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below those that the kernel gives out."""
    for _ in range(200):
        first = random.SystemRandom().randrange(15000, 32000 - count)
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, each in enumerate(sockets):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("0.0.0.0", first + i))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


class Child:
    """One process of the run, started again and again."""

    def __init__(self, directory: Path, name: str, words: list, prefix: list = ()):
        self.directory, self.name, self.prefix = directory, name, prefix
        self.set_words(words)
        self.kind = name.rstrip("0123456789")
        self.popen = None
        self.killed = False   # by us
        self.crash = None     # name of the point at which it is to die
        self.stopped_until = None
        self.lives = 0

    def set_words(self, words: list):
        """The command of the lives to come."""
        self.words = [*map(str, self.prefix), *map(str, words)]

    def start(self, crash: str = None, number: int = 1):
        env = {k: v for k, v in os.environ.items() if not k.startswith("GRADQ_")}
        if crash:
            env["GRADQ_TEST_CRASH"] = f"{crash}:{number}"
        self.crash, self.killed, self.stopped_until = crash, False, None
        self.lives += 1
        with open(self.directory / f"{self.name}.log", "ab") as log:
            self.popen = subprocess.Popen(self.words, env=env, stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, start_new_session=True)

    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def kill(self) -> bool:
        """kill -9; false when it had ended by itself before."""
        if not self.running():
            return False
        self.killed = True
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()
        return True

    def stop_for(self, seconds: float) -> bool:
        if not self.running() or self.stopped_until is not None:
            return False
        self.popen.send_signal(signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds
        return True

    def go_on(self):
        if self.stopped_until is not None and self.running():
            self.popen.send_signal(signal.SIGCONT)
        self.stopped_until = None

    def tail(self, count: int = 5) -> str:
        """Its last lines, of all its lives."""
        path = self.directory / f"{self.name}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-count:])[-1500:]


class Network:
    """A second network namespace, reached over a pair of virtual cables.

    A cut takes the cable out, which both kernels notice, or makes a hole of it: what is sent is
    addressed to nobody, and only silence tells, as behind a switch that failed.
    """
    OUTER_MAC, INNER_MAC, NOBODY = (f"02:00:00:00:00:{last}" for last in ("01", "02", "ff"))

    def __init__(self):
        number = os.getpid() % 60000
        self.name, self.outer, self.inner = f"gqc{number}", f"gqo{number}", f"gqi{number}"
        net = f"10.{200 + number // 250 // 250}.{number // 250 % 250}.{number % 63 * 4}"
        stem, last = net.rsplit(".", 1)
        self.host = f"{stem}.{int(last) + 1}"
        self.prefix = ["ip", "netns", "exec", self.name]
        self.inner_host = f"{stem}.{int(last) + 2}"
        self.down_until = None
        self.up_since = 0.0
        try:
            self.ip("netns", "add", self.name)
            self.ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner)
            self.ip("link", "set", self.outer, "address", self.OUTER_MAC)
            self.ip("link", "set", self.inner, "address", self.INNER_MAC)
            self.ip("link", "set", self.inner, "netns", self.name)
            self.ip("addr", "add", f"{self.host}/30", "dev", self.outer)
            self.ip("link", "set", self.outer, "up")
            self.ip("-n", self.name, "addr", "add", f"{self.inner_host}/30", "dev", self.inner)
            self.ip("-n", self.name, "link", "set", self.inner, "up")
            self.ip("-n", self.name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)

    def address_to(self, outer: str, inner: str):
        """Whom both ends take for the other one."""
        self.ip("neigh", "replace", self.inner_host, "lladdr", inner, "dev", self.outer)
        self.ip("-n", self.name, "neigh", "replace", self.host, "lladdr", outer, "dev", self.inner)

    def cut(self, seconds: float, hole: bool) -> bool:
        if self.down_until is not None or time.monotonic() < self.up_since + UP_S:
            return False
        if hole:
            self.address_to(self.NOBODY, self.NOBODY)
        else:
            self.ip("link", "set", self.outer, "down")
        self.down_until = time.monotonic() + seconds
        return True

    def heal(self):
        if self.down_until is not None:
            self.ip("link", "set", self.outer, "up")
            self.address_to(self.OUTER_MAC, self.INNER_MAC)
            self.up_since = time.monotonic()
        self.down_until = None

    def close(self):
        for words in (("link", "del", self.outer), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=10)


def namespaces_work() -> str:
    """"" or why not."""
    try:
        Network().close()
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return error.stderr.decode(errors="replace").strip()
    return ""
