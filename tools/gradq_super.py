"""Talk to supervisord: start it, ask it, stop a run in order.

Not on a gradient's path.  Knows processes by name and state only; settings and commands are
gradq_run.py's.  Must never kill by name or pattern: what it stops is supervisord's own.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import xmlrpc.client

try:
    from supervisor.xmlrpc import SupervisorTransport
except ImportError:
    sys.exit("gradq: Python's supervisor is missing: apt-get install supervisor")

from gradq_run import (EXIT_CONFIG, FINAL_EXITS, STOP_WAIT_S, Failure, kind_of, tail_lines)

# supervisord answers in milliseconds; one that is stopped (SIGSTOP) must not hang us for ever.
RPC_WAIT_S = 15
START_WAIT_S = 15
POLL_S = 0.05
# Crashes in a row after which a process is held to be broken: one or two may be a race at start.
CRASHES_MAX = 3


class Gone(Exception):
    """supervisord does not answer."""


class Supervisor:
    def __init__(self, run):
        self.run = run
        self.socket = run.settings["supervisor_socket"]
        self.child = None
        self.pid = None
        self.log_offset = 0
        self.spawns, self.crashes = {}, {}

    def call(self, method, *arguments):
        """One RPC on a connection of its own; Gone when nobody answers."""
        transport = SupervisorTransport(None, None, serverurl="unix://" + self.socket)
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(RPC_WAIT_S)
        try:
            proxy = xmlrpc.client.ServerProxy("http://localhost", transport=transport)
            function = proxy
            for part in method.split("."):
                function = getattr(function, part)
            return function(*arguments)
        except (OSError, xmlrpc.client.ProtocolError) as error:
            raise Gone(str(error)) from None
        except xmlrpc.client.Fault as error:
            if error.faultString.startswith("SHUTDOWN_STATE"):
                raise Gone("supervisord is shutting down") from None
            raise
        finally:
            socket.setdefaulttimeout(before)
            transport.close()

    def live(self):
        try:
            return bool(self.call("supervisor.getState"))
        except Gone:
            return False

    def start(self, foreground):
        """Start supervisord and wait until it answers.  In the foreground it ends with us."""
        launcher = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "gradq_supervisord.py")
        argv = ["setpriv", "--pdeathsig", "TERM", "--"] if foreground else []
        argv += [sys.executable, launcher, "-c", "supervisord.conf"]
        said = self.run.path("supervisor", "start.out")
        with open(said, "wb") as out:
            # A session of its own: Ctrl-C reaches us alone, and we stop the rest in order.
            self.child = subprocess.Popen(argv, cwd=self.run.path("supervisor"), stdout=out,
                                          stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                                          start_new_session=True)
        deadline = time.monotonic() + START_WAIT_S
        while not self.live():
            if self.child.poll() is not None or time.monotonic() > deadline:
                if self.child.poll() is None:
                    self.child.kill()
                    self.child.wait()
                tail = "\n".join(tail_lines(said, 8)
                                 or tail_lines(self.run.path("supervisor/supervisord.log"), 8))
                raise Failure(f"supervisord did not start; it said:\n{tail}", EXIT_CONFIG)
            time.sleep(POLL_S)

    # ---- processes ----

    def read_log(self):
        """Count starts, and crashes in a row, of each process from supervisord's log.

        A crash: an exit of its own accord that is not expected, before it ran for startsecs.
        SIGKILL is somebody else's doing.
        """
        with open(self.run.path("supervisor", "supervisord.log"), "rb") as file:
            file.seek(self.log_offset)
            data = file.read()
        whole = data[:data.rfind(b"\n") + 1]
        self.log_offset += len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            found = re.search(r" INFO spawned: '([^']+)' with pid", line)
            if found:
                self.spawns[found[1]] = self.spawns.get(found[1], 0) + 1
            found = re.search(r" INFO success: (\S+) entered RUNNING state", line)
            if found:
                self.crashes[found[1]] = 0
            found = re.search(r" WARN exited: (\S+) \(.*; not expected\)", line)
            if found and "SIGKILL" not in line:
                self.crashes[found[1]] = self.crashes.get(found[1], 0) + 1

    def processes(self):
        """[{name, state, pid, restarts, exit, over, crashes}] in start order.

        supervisord says STARTING for the first seconds of a process that runs; for people it
        runs, so it is RUNNING here.  restarts: starts after the first, asked for or not.  over: it
        has ended, and supervisord will not start it again.
        """
        rows = []
        processes = self.call("supervisor.getAllProcessInfo")
        self.read_log()  # after it: a process that it names has been logged by now
        for info in processes:
            state = info["statename"]
            if state == "STARTING" and info["pid"]:
                state = "RUNNING"
            rows.append({"name": info["name"], "state": state, "pid": info["pid"] or None,
                         "restarts": max(0, self.spawns.get(info["name"], 0) - 1),
                         "exit": info["exitstatus"], "over": over(info),
                         "crashes": self.crashes.get(info["name"], 0)})
        return sorted(rows, key=lambda row: order(row["name"]))

    def process(self, name):
        return next((row for row in self.processes() if row["name"] == name), None)

    def refusal(self):
        """A Failure when a service, or every actor, has ended for good; else None."""
        rows = self.processes()
        ended = [row for row in rows if row["over"]]
        actors = [row for row in rows if kind_of(row["name"]) == "actor"]
        bad = [row for row in rows if row["crashes"] >= CRASHES_MAX
               or (row["over"] and (row["exit"] or row["state"] != "EXITED"))]
        for row in ended:
            if kind_of(row["name"]) in ("broker", "optimizer"):
                return self.explain(row)
        if actors and all(row in bad for row in actors):
            return self.explain(actors[0])
        return None

    def explain(self, row):
        """The Failure that tells of a process which cannot run."""
        name = row["name"]
        config = row["state"] == "EXITED" and row["exit"] in FINAL_EXITS[1:]
        how = (f"ended with exit code {row['exit']}" if row["over"] and row["state"] == "EXITED"
               else f"does not stay up ({row['crashes']} crashes in a row)")
        tail = "\n".join("  " + line for line in self.run.log_tail(name))
        return Failure(f"{name} {how}; it said:\n{tail or '  nothing'}\n"
                       f"(tools/gradq logs {name} --run {shlex.quote(self.run.given)})",
                       EXIT_CONFIG if config else 1)

    def signal(self, name, word):
        self.call("supervisor.signalProcess", name, word)

    def forget(self, names):
        """What crashed before is of another program or another setting."""
        self.read_log()
        for name in names:
            self.crashes.pop(name, None)

    def begin(self, name):
        self.forget([name])
        self.call("supervisor.startProcess", name, False)

    def add(self, names):
        """Take in new program files; supervisord starts them."""
        self.forget(names)
        self.call("supervisor.reloadConfig")
        for name in names:
            self.call("supervisor.addProcessGroup", name)

    def remove(self, names):
        self.stop(names)
        for name in names:
            self.call("supervisor.removeProcessGroup", name)

    def stop(self, names):
        """Ask all to end, wait for all.  supervisord kills after stopwaitsecs."""
        for name in names:
            try:
                self.call("supervisor.stopProcess", name, False)
            except xmlrpc.client.Fault as fault:
                if not fault.faultString.startswith(("NOT_RUNNING", "BAD_NAME")):
                    raise
        deadline = time.monotonic() + 10 + max(
            [STOP_WAIT_S[kind_of(name)] for name in names], default=0)
        moving = ("STOPPING", "RUNNING", "BACKOFF", "STARTING")
        while any(row["name"] in names and row["state"] in moving for row in self.processes()):
            if time.monotonic() > deadline:
                raise Failure(f"{', '.join(names)} did not stop in time")
            time.sleep(POLL_S)

    def stop_all(self):
        """Actors, then optimizer (it writes the final checkpoint) and recorder, then broker and
        exporter, then supervisord.

        supervisord's own shutdown keeps that order too, but stops actors one after another.
        """
        try:
            self.pid = self.call("supervisor.getPID")
            names = [row["name"] for row in self.processes()]
            # The recorder writes what actors have said, while the optimizer writes its checkpoint.
            for kinds in (("actor",), ("optimizer", "recorder"), ("broker", "exporter")):
                self.stop([name for name in names if kind_of(name) in kinds])
            self.call("supervisor.shutdown")
        except Gone:
            pass  # it is going already, or was killed: its processes get SIGTERM either way
        if self.child is not None:
            try:
                self.child.wait(STOP_WAIT_S["optimizer"] + 30)
            except subprocess.TimeoutExpired:
                raise Failure("supervisord does not end; see supervisor/supervisord.log") from None

    def wait_gone(self):
        """Until supervisord has ended: it does so after everything that it held."""
        deadline = time.monotonic() + STOP_WAIT_S["optimizer"] + 30
        while self.live() or (self.pid and running(self.pid)):
            if time.monotonic() > deadline:
                raise Failure("supervisord does not end; see supervisor/supervisord.log")
            time.sleep(POLL_S)


def running(pid):
    """A process that has ended, but whose parent has not asked yet, does not run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def over(info):
    """supervisord starts again whatever ends with another code (autorestart=unexpected), but only
    when its loop comes round: until then, a second at most, a process that was killed (exit status
    -1) is EXITED as well."""
    return info["statename"] in ("FATAL", "UNKNOWN") or (
        info["statename"] == "EXITED" and info["exitstatus"] in FINAL_EXITS)


def order(name):
    kind, _, number = name.partition("-")
    kinds = ["broker", "optimizer", "actor", "watch", "recorder", "exporter"]
    return (kinds.index(kind) if kind in kinds else len(kinds), int(number or 0), name)
