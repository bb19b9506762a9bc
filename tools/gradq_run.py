"""The run directory of tools/gradq: settings, addresses, and the programs that supervisord starts.

Not on a gradient's path.  Writes files only inside the run directory (and one private directory
for sockets when the run directory's path is too long); never starts or stops a process.

    DIR/settings.json        what `up` was given; `--resume`, `scale` and `swap` read it
    DIR/address              the control endpoint, one line, while the run is up
    DIR/supervisor/          supervisord's configuration, log and socket
    DIR/supervisor/programs/ NAME.conf for supervisord, NAME.sh with the command itself
    DIR/log/                 NAME.jsonl (the process' own log), NAME.out (its stdout and stderr)
    DIR/metrics/             actor-K.jsonl (a line per episode, and one per second of training),
                             run.jsonl (a line per second)
    DIR/tensorboard/         event files and state of the recorder, see gradq_tensorboard.py
    DIR/summary.png          the learning curve, drawn when `up` ends and by `plot`
    DIR/old/N/               earlier runs of the same directory
"""

import fcntl
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_CONFIG = 1, 2, 69, 78
# A process that ends so is not started again: done, usage, configuration, and what setpriv
# answers when the command cannot be executed or does not exist.
FINAL_EXITS = (0, EXIT_USAGE, EXIT_CONFIG, 126, 127)
# sun_path of a Unix socket holds 108 bytes, its final NUL included.
SOCKET_PATH_BYTES_MAX = 107
CONTROL_SUFFIXES = ("", ".gradients-in", ".gradients-out", ".weights-in", ".weights-out",
                    ".acks-out")
# supervisord binds NAME.PID first and renames it; a pid has at most 7 digits.
SUPERVISOR_SUFFIX = ".4194304"
ACTORS_MAX = 4096  # GQ_ACTORS_MAX
PORTS = len(CONTROL_SUFFIXES)
PYTHON_WAIT_S = 10

DEFAULTS = {
    # optimizer None: the process finds its rule in GRADQ_OPTIMIZER, an INI file, its own default.
    # tensorboard None: where a Python has the package.
    "actors": 4, "env": "CartPole-v1", "env_set": [], "optimizer": None, "set": [], "seed": 1,
    "target_return": None, "max_steps": None, "actor": None, "address": None,
    "broker_option": [], "optimizer_option": [], "actor_option": [], "tensorboard": None,
    "net": None, "metrics_listen": None,
}
# What `--net` brings where nothing else was said: settings that are known to learn games from
# pixels.  The loss is summed over a rollout, so the gradient's norm is bounded.
RECIPES = {
    "conv-lstm": {
        "optimizer": "adam", "set": ["lr=4e-4", "eps=1e-3", "clip_norm=40"],
        "actor_option": ["envs-per-actor=4", "normalise=running", "reward-clip=1",
                         "reduction=sum", "entropy-weight=0.01"]},
}
# Options that tools/gradq gives itself, so that a pass-through cannot contradict it.
OWN_OPTIONS = {
    "broker": ("address", "log-file"),
    "optimizer": ("address", "log-file", "run", "resume", "optimizer", "set"),
    "actor": ("address", "log-file", "actor", "seed", "env", "env-set", "metrics"),
}
# Priorities: supervisord starts upwards and stops downwards.  stopwaitsecs: an actor waits for
# its last acknowledgements; the optimizer writes gigabytes at worst; then SIGKILL.
PRIORITY = {"broker": 10, "optimizer": 20, "actor": 30, "watch": 40, "recorder": 40, "exporter": 40}
STOP_WAIT_S = {"broker": 10, "optimizer": 120, "actor": 15, "watch": 10, "recorder": 20,
               "exporter": 10}
# Nobody waits for these, and a run goes on without them.
SIDE_KINDS = ("recorder", "exporter")


class Failure(Exception):
    """What the user is told, and the exit code that goes with it."""

    def __init__(self, text, code=EXIT_FAILED):
        super().__init__(text)
        self.code = code


def say(text):
    print(text, flush=True)


def actors_said(number):
    return f"{number} actor{'' if number == 1 else 's'}"


def kind_of(name):
    """actor-3 -> actor"""
    return name.split("-")[0]


def rule_name(optimizer):
    """A shipped rule stays a word; a file becomes absolute, so that `swap` works from anywhere."""
    if "/" in optimizer or optimizer.endswith(".so"):
        return os.path.abspath(optimizer)
    return optimizer


def build_directory(given):
    """Where the binaries lie: as told, beside this script (installed), or build/ of the tree."""
    here = os.path.dirname(os.path.realpath(sys.argv[0]))
    if given:
        return os.path.abspath(given)
    if os.path.exists(os.path.join(here, "gradq-broker")):
        return here
    return os.path.join(os.path.dirname(here), "build")


def lacking(words, given):
    """Those KEY=VALUE words whose key is in none of the given ones."""
    keys = {word.partition("=")[0] for word in given}
    return [word for word in words if word.partition("=")[0] not in keys]


def with_recipe(settings):
    """The settings, and under them what RECIPES has for their net."""
    recipe = RECIPES.get(settings["net"])
    if recipe is None or settings["actor"] is not None:
        return settings
    result = {**settings, "actor_option": settings["actor_option"]
              + lacking(recipe["actor_option"], settings["actor_option"])}
    # A rule that is named elsewhere is left to itself.
    elsewhere = "GRADQ_OPTIMIZER" in os.environ or "GRADQ_CONFIG" in os.environ or any(
        word.startswith("config=") for word in settings["optimizer_option"])
    if settings["optimizer"] == recipe["optimizer"] or (
            settings["optimizer"] is None and not elsewhere):
        result["optimizer"] = recipe["optimizer"]
        result["set"] = settings["set"] + lacking(recipe["set"], settings["set"])
    return result


def beside(name):
    """The path of another of our scripts."""
    return os.path.join(os.path.dirname(os.path.realpath(__file__)), name)


def find_python(build, package, settings=None):
    """The first Python that has a package, None when none has: where actors look for Gymnasium
    (actors/gym.c), and where it is not beside that, where `make venv` puts it."""
    told = [pair[7:] for pair in (settings or {}).get("actor_option", ())
            if pair.startswith("python=")]
    # Not imported, which would take half a second.  A directory of that name has no origin.
    ask = ("import sys, importlib.util as u; s = u.find_spec(sys.argv[1]); "
           "sys.exit(s is None or s.origin is None)")
    for python in [*told, os.environ.get("GRADQ_PYTHON"), os.path.join(build, "venv/bin/python"),
                   os.path.join(build, "../venv/bin/python"), "python3"]:
        try:
            if python and subprocess.run([python, "-c", ask, package], stdin=subprocess.DEVNULL,
                                         capture_output=True, timeout=PYTHON_WAIT_S,
                                         check=False).returncode == 0:
                return python
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


class Run:
    def __init__(self, directory, build=None):
        self.given = directory
        self.dir = os.path.abspath(directory)
        self.build = build_directory(build)
        self.settings = None
        if any(character in self.dir for character in "\n*?["):
            raise Failure("the run directory's path holds a line break, *, ? or [, and supervisord "
                          "would not find its program files there; choose another", EXIT_USAGE)

    def path(self, *parts):
        return os.path.join(self.dir, *parts)

    def write_result(self, code, text):
        self.write("result.json", json.dumps({"exit": code, "text": text}) + "\n")

    def result(self):
        """(exit code, sentence) of the run's end; None while there is none."""
        try:
            with open(self.path("result.json"), encoding="utf-8") as file:
                result = json.load(file)
            return result["exit"], result["text"]
        except (OSError, ValueError, KeyError):
            return None

    def shown(self, path):
        """A path inside, as the user named the run directory."""
        return os.path.join(self.given, os.path.relpath(path, self.dir))

    def binary(self, name):
        path = os.path.join(self.build, "gradq-" + name)
        if not os.access(path, os.X_OK):
            raise Failure(f"{path} is missing: run `make` first", EXIT_CONFIG)
        return path

    # ---- settings ----

    def load(self):
        """Settings of an existing run, or a Failure that says how to make one."""
        try:
            with open(self.path("settings.json"), encoding="utf-8") as file:
                self.settings = {**DEFAULTS, **json.load(file)}
        except FileNotFoundError:
            raise Failure(f"{self.given} holds no run; start one with "
                          f"`tools/gradq up --run {shlex.quote(self.given)}`") from None
        except (OSError, ValueError) as error:
            raise Failure(f"{self.path('settings.json')} cannot be read: {error}") from None
        return self.settings

    def save(self):
        self.write("settings.json", json.dumps(self.settings, indent=2) + "\n")

    def write(self, name, text, mode=0o644):
        """Whole or not at all: readers never see half a file."""
        path = self.path(name)
        with open(path + ".new", "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        os.replace(path + ".new", path)

    def address(self):
        try:
            with open(self.path("address"), encoding="utf-8") as file:
                return file.readline().strip() or None
        except OSError:
            return None

    # ---- the directory ----

    def lock(self):
        """Held while `up` starts: of two at once, the second is refused."""
        try:
            os.makedirs(self.dir, exist_ok=True)
            handle = os.open(self.path("up.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another `up` is starting in {self.given}") from None
        except OSError as error:
            raise Failure(f"{self.dir} cannot be used as run directory: {error.strerror}",
                          EXIT_CONFIG) from None
        return handle

    def entries(self):
        """What an earlier run left here."""
        return [name for name in os.listdir(self.dir) if name not in ("old", "up.lock")]

    def prepare(self, resume):
        """Make room for a run: keep its files (resume), or move an earlier run's aside."""
        entries = self.entries()
        if entries and "settings.json" not in entries:
            raise Failure(f"{self.given} is not empty and no run directory of gradq; "
                          "choose another with --run DIR", EXIT_CONFIG)
        self.remove_socket_directory()
        if entries and not resume:
            os.makedirs(self.path("old"), exist_ok=True)
            taken = [int(name) for name in os.listdir(self.path("old")) if name.isdigit()]
            keep = os.path.join("old", str(max(taken, default=0) + 1))
            os.mkdir(self.path(keep))
            for name in entries:
                os.rename(self.path(name), self.path(keep, name))
            say(f"the earlier run in {self.given} was moved to {os.path.join(self.given, keep)}"
                " (--resume goes on from it instead)")
        if resume:
            shutil.rmtree(self.path("supervisor", "programs"), ignore_errors=True)
            for name in ("supervisor/supervisord.log", "result.json"):
                if os.path.exists(self.path(name)):
                    os.replace(self.path(name), self.path(name + ".before"))
        for name in ("supervisor/programs", "log", "metrics"):
            os.makedirs(self.path(name), exist_ok=True)

    def checkpoint(self):
        """(path, mtime_ns) of the newest checkpoint of this run, or (None, 0)."""
        newest = (None, 0)
        for directory, names, files in os.walk(self.dir):
            if directory == self.dir:
                names[:] = [name for name in names if name not in ("old", "supervisor")]
            for name in files:
                if name.endswith(".safetensors"):
                    path = os.path.join(directory, name)
                    try:
                        stamp = os.stat(path).st_mtime_ns
                    except FileNotFoundError:
                        continue  # deleted as an old one meanwhile
                    newest = max(newest, (path, stamp), key=lambda pair: pair[1])
        return newest

    # ---- sockets ----

    def choose_sockets(self):
        """Fill address and supervisor_socket of the settings; say so when they lie elsewhere."""
        settings = self.settings
        control, rpc = self.path("control"), self.path("supervisor", "socket")
        asked = settings["address"]
        names = [rpc + SUPERVISOR_SUFFIX]
        if not asked:
            names += [control + suffix for suffix in CONTROL_SUFFIXES]
        if max(len(os.fsencode(name)) for name in names) > SOCKET_PATH_BYTES_MAX:
            private = private_directory()
            settings["socket_directory"] = private
            control, rpc = os.path.join(private, "control"), os.path.join(private, "supervisor")
            say(f"the path of {self.given} is too long for sockets; they lie in {private}")
        settings["supervisor_socket"] = rpc
        if not asked:
            settings["endpoint"] = "ipc://" + control
        elif asked == "tcp":
            settings["endpoint"] = f"tcp://127.0.0.1:{free_ports()}"
        else:
            settings["endpoint"] = asked

    def remove_socket_directory(self):
        """Drop the private directory of a run that has ended."""
        try:
            with open(self.path("settings.json"), encoding="utf-8") as file:
                private = json.load(file).get("socket_directory")
        except (OSError, ValueError, AttributeError):
            return
        if private and os.path.basename(private).startswith("gradq-"):
            shutil.rmtree(private, ignore_errors=True)

    # ---- programs ----

    def names(self):
        """Every program of the run as settings have it."""
        watched = self.settings.get("detached") and (
            self.settings["target_return"] is not None or self.settings["max_steps"] is not None)
        return (["broker", "optimizer"] + [f"actor-{k}" for k in range(self.settings["actors"])]
                + (["watch"] if watched else [])
                + (["recorder"] if self.settings.get("recorder_python") else [])
                + (["exporter"] if self.settings["metrics_listen"] else []))

    def command(self, name):
        """(argument vector, extra environment) of a program."""
        settings, kind, environment = self.settings, kind_of(name), {}
        words = ["--address", settings["endpoint"], "--log-file", self.path("log", name + ".jsonl")]
        if kind == "broker":
            argv = [self.binary("broker"), *words, *option_words(settings["broker_option"])]
        elif kind == "optimizer":
            # Always --resume: after a crash it goes on from the newest checkpoint, and a fresh
            # run has none.
            argv = [self.binary("optimizer"), *words, "--run", self.dir, "--resume",
                    *rule_words(settings), *option_words(settings["optimizer_option"])]
        elif kind == "watch":
            argv = [sys.executable, os.path.realpath(sys.argv[0]), "watch", "--run", self.dir,
                    "--build", self.build]
        elif kind == "exporter":
            argv = [self.binary("exporter"), "--address", settings["endpoint"],
                    "--listen", settings["metrics_listen"]]
        elif kind == "recorder":
            # It asks for these signals itself, when Python is up: a short run is recorded as well.
            argv = ["env", "--block-signal=TERM,INT,HUP", settings["recorder_python"],
                    beside("gradq_tensorboard.py"), self.dir]
            environment = {"OPENBLAS_NUM_THREADS": "1"}
        else:
            number, metrics = name.split("-")[1], self.path("metrics", name + ".jsonl")
            if settings["actor"]:
                argv = shlex.split(settings["actor"])
                environment = {
                    "GRADQ_ADDRESS": settings["endpoint"], "GRADQ_ACTOR": number,
                    "GRADQ_SEED": str(settings["seed"]), "GRADQ_RUN": self.dir,
                    "GRADQ_METRICS": metrics, "GRADQ_ENV": settings["env"]}
                if settings["env_set"]:
                    environment["GRADQ_ENV_SET"] = ";".join(settings["env_set"])
                argv += option_words(settings["actor_option"])
            else:
                argv = [self.binary("actor"), *words, "--actor", number,
                        "--seed", str(settings["seed"]), "--env", settings["env"],
                        *repeat("--env-set", settings["env_set"]), "--metrics", metrics,
                        *(["--net", settings["net"]] if settings["net"] else []),
                        *option_words(settings["actor_option"])]
        return argv, environment

    def write_program(self, name):
        """The command goes into a shell script: nothing of it meets supervisord's own quoting,
        and `swap` changes it without touching supervisord."""
        argv, environment = self.command(name)
        kind, log = kind_of(name), shlex.quote(self.path("log", name + ".out"))
        lines = ["#!/bin/sh", "# Written by tools/gradq for this run.",
                 f"exec >>{log} 2>&1 </dev/null",
                 f"cd -- {shlex.quote(self.settings['cwd'])} || exit {EXIT_CONFIG}"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]
        # pdeathsig: when supervisord itself is killed, no orphan remains.
        lines += ["exec setpriv --pdeathsig TERM -- " + shlex.join(argv), ""]
        base = os.path.join("supervisor", "programs", name)
        self.write(base + ".sh", "\n".join(lines))
        self.write(base + ".conf", "\n".join([
            f"[program:{name}]", f"command=/bin/sh programs/{name}.sh",
            f"priority={PRIORITY[kind]}", "autorestart=unexpected",
            f"exitcodes={','.join(str(code) for code in FINAL_EXITS)}",
            # Back-off of 1, 2, 3 ... s for what dies within startsecs.
            "startsecs=5", "startretries=20",
            f"stopwaitsecs={STOP_WAIT_S[kind]}", "killasgroup=true",
            "stdout_logfile=NONE", "stderr_logfile=NONE", ""]))

    def remove_program(self, name):
        for suffix in (".conf", ".sh"):
            os.unlink(self.path("supervisor", "programs", name + suffix))

    def write_supervisor(self):
        # Relative where possible: what may stand in a path is more than supervisord's format takes.
        rpc = self.settings["supervisor_socket"]
        if os.path.dirname(rpc) == self.path("supervisor"):
            rpc = os.path.basename(rpc)
        self.write("supervisor/supervisord.conf", "\n".join([
            "[supervisord]", "nodaemon=true", "silent=true", "pidfile=supervisord.pid",
            # Never rotated: `status` counts restarts in it.
            "logfile=supervisord.log", "logfile_maxbytes=0",
            "[unix_http_server]", f"file={rpc}", "chmod=0700",
            "[rpcinterface:supervisor]",
            "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
            "[include]", "files=programs/*.conf", ""]))

    def log_tail(self, name, lines=8):
        """What a process said last: its stderr, else errors of its own log."""
        said = tail_lines(self.path("log", name + ".out"), lines)
        if said:
            return said
        found = []
        for line in tail_lines(self.path("log", name + ".jsonl"), 200):
            try:
                if json.loads(line).get("level") == "error":
                    found.append(line)
            except (ValueError, AttributeError):
                continue
        return found[-lines:]


def repeat(flag, values):
    return [word for value in values for word in (flag, value)]


def rule_words(rule):
    """Flags of an update rule: {"optimizer": NAME or None, "set": [K=V, ...]}."""
    name = ["--optimizer", rule["optimizer"]] if rule["optimizer"] is not None else []
    return [*name, *repeat("--set", rule["set"])]


def option_words(pairs):
    """["capacity=4", "greedy"] -> ["--capacity", "4", "--greedy"]"""
    words = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        words += ["--" + key] + ([value] if equals else [])
    return words


def tail_lines(path, count):
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


def private_directory():
    """A 0700 directory with a short path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = re.fullmatch(r"/[\w/.-]{1,60}", runtime) and os.access(runtime, os.W_OK)
    return tempfile.mkdtemp(prefix="gradq-", dir=runtime if usable else "/tmp")


def free_ports(count=PORTS):
    """The first of consecutive free ports, below the kernel's ephemeral range."""
    for _ in range(200):
        first, held = random.randrange(20000, 32000), []
        try:
            for port in range(first, first + count):
                held.append(socket.socket())
                held[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise Failure(f"no {count} consecutive free TCP ports were found; name some with "
                  "--address tcp://HOST:PORT, --metrics-listen HOST:PORT")
