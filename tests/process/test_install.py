"""`make install` puts every file where it belongs and no other, what is installed works by itself,
and `make uninstall` takes all of it away again."""
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import BUILD, ROOT, SANITIZED, SLOW, free_ports, wait_for

sys.path.insert(0, str(ROOT / "actors/python"))
import gradq  # noqa: E402

pytestmark = pytest.mark.skipif(SANITIZED, reason="what is installed is the plain build")

PROGRAMS = ["gradq-" + name for name in ("broker", "optimizer", "actor", "top", "try", "bench",
                                         "replay", "exporter")]
COMMANDS = ["gradq", *PROGRAMS]
SCRIPTS = ["gradq", *("gradq_" + name + ".py" for name in (
    "curve", "metrics", "run", "super", "supervisord", "tensorboard", "watch"))]
RULES = ("adagrad", "adam", "adamw", "lion", "rmsprop", "sgd")
HEADERS = ("gradq", "limits", "optimizer", "protocol", "status")
VERSION = re.search(r'GQ_VERSION_STRING "(\d+\.\d+\.\d+)"',
                    (ROOT / "include/gradq/gradq.h").read_text())[1]
SONAME = f"libgradq.so.{VERSION.split('.')[0]}"
EXPECTED = sorted([
    *(f"bin/{name}" for name in COMMANDS), *(f"lib/gradq/{name}" for name in PROGRAMS + SCRIPTS),
    *(f"lib/gradq/plugins/{name}.so" for name in RULES),
    *(f"include/gradq/{name}.h" for name in HEADERS),
    "lib/libgradq.a", "lib/libgradq.so", f"lib/{SONAME}", f"lib/libgradq.so.{VERSION}",
    "lib/pkgconfig/gradq.pc", *(f"share/man/man1/{name}.1" for name in COMMANDS),
    "share/man/man3/gradq.3", "share/man/man7/gradq.7",
    *(f"share/bash-completion/completions/{name}" for name in COMMANDS)])


def environment(**more) -> dict:
    # What this make was told is for its own jobs.
    return {**{k: v for k, v in os.environ.items()
               if not k.startswith(("GRADQ_", "MAKE", "MFLAGS"))}, **more}


def run(*words, fails: bool = False, **more) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True,
                          timeout=200 * SLOW, check=False, stdin=subprocess.DEVNULL,
                          env=environment(), **more)
    assert (done.returncode != 0) == fails, (words, done.stdout[-4000:], done.stderr[-4000:])
    return done.stdout


def make(target: str, prefix, destination=""):
    if BUILD != ROOT / "build":
        pytest.skip("make installs from build/")
    run("make", "-C", ROOT, target, f"PREFIX={prefix}", f"DESTDIR={destination}")


def content(directory: Path) -> list:
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*")
                  if not each.is_dir() or each.is_symlink())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """An installation below a PREFIX of its own."""
    path = tmp_path_factory.mktemp("prefix")
    make("install", path)
    yield path
    make("uninstall", path)


def test_every_file_is_there_and_no_other_and_all_goes_again(tmp_path):
    make("install", "/usr", tmp_path)
    usr = tmp_path / "usr"
    assert content(tmp_path) == [f"usr/{name}" for name in EXPECTED]
    for name in EXPECTED:
        path = usr / name
        assert path.resolve().is_file() and path.resolve().is_relative_to(usr), name
        runs = name.startswith(("bin/", "lib/gradq/")) and not path.name.startswith("gradq_")
        assert not runs or os.access(path, os.X_OK), name
    assert "prefix=/usr\n" in (usr / "lib/pkgconfig/gradq.pc").read_text()
    (usr / "lib/gradq/plugins/own.so").write_text("the user's")
    make("uninstall", "/usr", tmp_path)
    assert content(tmp_path) == ["usr/lib/gradq/plugins/own.so"]
    (usr / "lib/gradq/plugins/own.so").unlink()
    make("uninstall", "/usr", tmp_path)
    assert content(tmp_path) == []
    assert not [each for each in tmp_path.rglob("*") if each.name == "gradq"]


def test_one_version_is_said_everywhere(prefix):
    assert gradq.__version__ == VERSION
    assert pkg_config(prefix, "--modversion") == [VERSION]
    for name in PROGRAMS:
        assert run(prefix / "bin" / name, "--version") == f"{name} {VERSION}\n"
    assert f"gradq {VERSION}" in (prefix / "share/man/man1/gradq-broker.1").read_text()


def test_the_shared_library_exports_the_public_calls_and_nothing_else(prefix):
    library = prefix / "lib" / SONAME
    assert f"Library soname: [{SONAME}]" in run("readelf", "-d", library)
    headers = "".join(each.read_text() for each in sorted((prefix / "include/gradq").glob("*.h")))
    code = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    code = re.sub(r"^\s*#(?:.*\\\n)*.*$", "", code, flags=re.MULTILINE)
    declared = set(re.findall(r"\b(gq_\w+) \(", code)) - {"gq_apply"}  # which is a type
    assert len(declared) >= 15
    exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only",
                                                 library).splitlines()}
    assert exported == declared


def pkg_config(prefix: Path, *options) -> list:
    found = subprocess.run(["pkg-config", *options, "gradq"], capture_output=True, text=True,
                           timeout=60, check=True, env={
                               **os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")})
    return shlex.split(found.stdout)


# What the README's code leaves to its reader: gradients of ones, and an end after ten.
AROUND = r"""
static unsigned pushed;
static void ones (float *gradient)
{
    for (int i = 0; i < 8; i++)
        gradient[i] = 1;
}
#define compute(gradient, weights) if (weights == NULL || pushed++ == 10) break; ones (gradient)
int main (int argc, char **argv)
{
    const gq_tensor_shape tensors[2] = {{.name = "w", .rank = 2, .shape = {2, 3}},
                                        {.name = "b", .rank = 1, .shape = {2}}};
    const float first_weights[8] = {0};
    const uint32_t samples = 1;
    (void)argc;
%s
    return 0;
}
"""


def actor(directory: Path) -> Path:
    """The README's actor as a whole program; its address is the first argument."""
    code = re.search(r"```c\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    include, _, body = code.partition("\n")
    body, count = re.subn('"tcp://127.0.0.1:5600"', "argv[1]", body)
    assert count == 1 and include.startswith("#include")
    path = directory / "actor.c"
    path.write_text(f"#include <stdio.h>\n{include}\n{AROUND % body}")
    return path


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_the_actor_of_the_readme_works_with_what_is_installed(prefix, run_dir, kind):
    words = pkg_config(prefix, "--cflags", "--libs", *(["--static"] if kind == "static" else []))
    if kind == "static":
        words = ["-l:libgradq.a" if word == "-lgradq" else word for word in words]
    else:
        words.append(f"-Wl,-rpath,{prefix}/lib")
        assert not [word for word in words if word.startswith("-l") and word != "-lgradq"]
    program = run_dir / "actor"
    run("gcc", "-std=c11", "-Wall", "-Werror", "-o", program, actor(run_dir), *words)
    assert (SONAME in run("readelf", "-d", program)) == (kind == "shared")

    command, run_at = prefix / "bin/gradq", ["--run", run_dir / "run"]
    address = f"tcp://127.0.0.1:{free_ports()}"
    said = run(command, "up", "--actors", 0, "--detach", "--address", address, "--optimizer", "sgd",
               "--set", "lr=0.5", *run_at)
    try:
        assert said == f"address: {address}\n"
        run(program, address)
        top = [prefix / "bin/gradq-top", *run_at, "--once", "--json"]
        wait_for(lambda: json.loads(run(*top))["optimizer"]["applied"] == 10, 20, "ten steps")
    finally:
        run(command, "down", *run_at)
    said = run(prefix / "bin/gradq-replay", *run_at, "--out", run_dir / "w.safetensors")
    data = (run_dir / "w.safetensors").read_bytes()
    assert data.endswith(b"\0\0\xa0\xc0" * 8), "ten steps of -0.5"


def test_manual_pages_have_no_warnings_and_name_every_option(prefix):
    for page in sorted((prefix / "share/man").rglob("*.[137]")):
        done = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True,
                              timeout=60, check=True, stdin=subprocess.DEVNULL, env=environment(
                                  LC_ALL="C.UTF-8", MANWIDTH="80"))
        assert done.stderr == "", page
        assert "NAME" in done.stdout and len(done.stdout.splitlines()) > 20
        if page.stem in PROGRAMS:
            assert options_of(prefix, page.stem) <= set(re.findall(r"--[a-z0-9-]+", done.stdout))


def options_of(prefix: Path, *command) -> set:
    """What --help lists."""
    text = run(prefix / "bin" / command[0], *command[1:], "--help")
    heads = re.findall(r"^  (?:-[a-z], )?(--[a-z0-9-]+(?:, --[a-z0-9-]+)?)", text, re.MULTILINE)
    return set(re.findall(r"--[a-z0-9-]+", " ".join(heads)))


def complete(prefix: Path, *words) -> set:
    """What bash would offer for the last word."""
    script = (f". {prefix}/share/bash-completion/completions/{words[0]}; COMP_WORDS=(\"$@\"); "
              f"COMP_CWORD=$(($# - 1)); _gradq; printf '%s\\n' \"${{COMPREPLY[@]}}\"")
    return set(run("bash", "--norc", "-c", script, "bash", *words,
                   cwd=prefix / "lib/gradq").split("\n")) - {""}


def test_completion_offers_what_help_lists(prefix):
    for name in PROGRAMS:
        assert complete(prefix, name, "--") == options_of(prefix, name), name
    help_text = run(prefix / "bin/gradq", "--help")
    commands = set(re.findall(r"^    ([a-z]+)(?: |$)", help_text, re.MULTILINE))
    assert {"up", "down", "swap"} <= commands and "watch" not in commands
    assert complete(prefix, "gradq", "") - {"--help"} == commands
    for command in sorted(commands):
        assert complete(prefix, "gradq", command, "--") == options_of(prefix, "gradq",
                                                                      command), command


def test_completion_offers_values(prefix):
    lanes = {"auto", "inline", "shm"}
    assert complete(prefix, "gradq-actor", "--lane", "") == lanes
    assert complete(prefix, "gradq-actor", "--lane", "=", "i") == {"inline"}
    assert complete(prefix, "gradq-actor", "--lane", "=") == lanes
    assert "avx2" in complete(prefix, "gradq-try", "--cpu", "")  # --help leaves it one blank only
    assert "gradq_run.py" in complete(prefix, "gradq-optimizer", "--init", "gradq_r")
    assert complete(prefix, "gradq", "status", "--run", "") - {"__pycache__"} == {"plugins"}
    assert complete(prefix, "gradq-broker", "--capacity", "") == set(), "nobody knows a number"
