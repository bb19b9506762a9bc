#!/usr/bin/python3
"""Run every test of one build and say at the end what passed and what failed.

Usage: tests/run.py BUILD_DIRECTORY [unit] [programs] [process]

Unit tests (Criterion), programs with a plain main (threads, simulation) and process tests (pytest)
are three different things to start; this is the one place that knows how, with which sanitizer
settings, and how long each may take.  Everything runs from the root of the source tree.  A part
that runs nothing, or ends without its own summary, counts as a failure: silence is not success.
"""
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Per test; generous because two shared cores and a sanitizer can be a hundred times slower.
UNIT_TEST_S = 60
SANITIZED_FACTOR = 4
# Whole parts: no hang may hold up CI for ever.
PART_S = 1500


class Result(NamedTuple):
    part: str
    passed: int
    failed: int
    skipped: int = 0
    notes: tuple = ()


def environment(build: Path) -> dict:
    # A user's GRADQ_* settings would change what the programs under test do.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRADQ_")}
    env["BUILD"] = str(build)
    env["OPENBLAS_NUM_THREADS"] = "1"
    python = ROOT / "build/venv/bin/python"
    if python.exists():
        env["GRADQ_PYTHON"] = str(python)
    # Criterion exits with 0 after a leak unless the sanitizer aborts.
    env["ASAN_OPTIONS"] = "abort_on_error=1:detect_leaks=1:strict_string_checks=1"
    env["UBSAN_OPTIONS"] = "halt_on_error=1:abort_on_error=1:print_stacktrace=1"
    env["LSAN_OPTIONS"] = f"suppressions={ROOT}/tests/lsan.supp:print_suppressions=0"
    env["TSAN_OPTIONS"] = f"suppressions={ROOT}/tests/tsan.supp:second_deadlock_stack=1"
    return env


def run(command: list, env: dict, **more) -> tuple:
    """(exit status, output); the output is shown as well.  A time-out ends it and is a failure."""
    sys.stdout.flush()
    with subprocess.Popen(["timeout", "-k", "10", str(PART_S), *map(str, command)], cwd=ROOT,
                           env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors="replace", **more) as child:
        lines = []
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = child.wait()
    if status == 124:
        print(f"did not end within {PART_S} s", flush=True)
    return status, "".join(lines)


PARTS = ["unit", "programs", "process"]
# Process tests wait for processes more than they compute.
PROCESS_WORKERS = 3


def run_unit(build: Path, env: dict, factor: int) -> Result:
    status, output = run([build / "tests/unit", "--jobs", 2, "--timeout", UNIT_TEST_S * factor,
                           "--color=never"], env)
    found = re.search(r"Synthesis: Tested: (\d+) \| Passing: (\d+) \| Failing: (\d+)", output)
    if not found or found[1] == "0":
        return Result("unit", 0, 1, notes=(f"no summary from Criterion, exit {status}",))
    passed, failed = int(found[2]), int(found[3])
    notes = re.findall(r"^\[FAIL\] (.*?):? \(", output, re.MULTILINE)
    notes += re.findall(r"^\[FAIL\] (.*: CRASH!)", output, re.MULTILINE)
    if status != 0 and failed == 0:
        # A leak or a crash after the test proper: Criterion counts the test as passed.
        failed = 1
        notes.append(f"exit {status}, see the warnings above")
    return Result("unit", passed, failed, notes=tuple(notes))


def run_programs(build: Path, env: dict) -> Result:
    passed, failures = 0, []
    for source in sorted(ROOT.glob("tests/main_*.c")):
        print(f"-- {source.stem}", flush=True)
        status, _ = run([build / "tests" / source.stem], env)
        if status == 0:
            passed += 1
        else:
            failures.append(f"{source.stem}: exit {status}")
    return Result("programs", passed, len(failures), notes=tuple(failures))


def run_process(build: Path, env: dict) -> Result:
    report = build / "tests/process.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    status, _ = run(["/usr/bin/python3", "-m", "pytest", "-q", "-rs", "-n", PROCESS_WORKERS,
                      "-p", "no:cacheprovider", f"--junitxml={report}", "tests/process",
                      "tests/python"], env)
    if not report.exists():
        return Result("process", 0, 1, notes=(f"no report from pytest, exit {status}",))
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    count = {k: int(suite.get(k)) for k in ("tests", "errors", "failures", "skipped")}
    failed = count["errors"] + count["failures"]
    notes = [f"{case.get('classname').split('.')[-1]}.{case.get('name')}"
             for case in suite.iter("testcase")
             if case.find("failure") is not None or case.find("error") is not None]
    passed = count["tests"] - failed - count["skipped"]
    if status != 0 and failed == 0:
        failed = 1
        notes.append(f"pytest ended with exit {status}")
    return Result("process", passed, failed, count["skipped"], tuple(notes))


def main() -> int:
    parts = sys.argv[2:] or PARTS
    if len(sys.argv) < 2 or not set(parts) <= set(PARTS):
        print(__doc__, file=sys.stderr)
        return 2
    build = Path(sys.argv[1]).resolve()
    sanitized = build.name in ("address", "thread")
    env = environment(build)
    results = []
    if "unit" in parts and build.name == "thread":
        print("Criterion cannot run under ThreadSanitizer; see the programs")
    elif "unit" in parts:
        print("== unit tests", flush=True)
        results.append(run_unit(build, env, SANITIZED_FACTOR if sanitized else 1))
    if "programs" in parts:
        print("== programs", flush=True)
        results.append(run_programs(build, env))
    if "process" in parts:
        print("== process tests", flush=True)
        results.append(run_process(build, env))

    print(f"== summary of {os.path.relpath(build, ROOT)}")
    for result in results:
        print(f"{result.part:10}{result.passed:5} passed {result.failed:4} failed"
               f" {result.skipped:4} skipped")
    for result in results:
        for note in result.notes:
            print(f"FAILED {result.part}: {note}")
    failed = sum(result.failed for result in results)
    print(f"{sum(result.passed for result in results)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
