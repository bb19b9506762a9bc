#!/usr/bin/python3
"""Break the code on purpose, and see that the simulator notices.

    tests/sim/mutants.py [SEEDS]        `make mutants`; SEEDS is 1..20000 by default

Each mutant is one edit of a copy of the sources: what a careless change could do to exactly-once.
The simulator must fail on it; its first failing seed and the time are printed.  Exits 1 when one
survives, or when its text is no longer there to be edited.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("Makefile", "include", "src", "broker", "optimizer", "actors", "tests", "tools")
MUTANTS = {
    "the highest number instead of the map":
        ("optimizer/ledger.c",
         "    if (sequence <= set->cumulative)\n        return true;\n",
         "    int top = set->beyond == 0 ? 0 : 64 - __builtin_clzll (set->beyond);\n"
         "    if (sequence <= set->cumulative + (uint64_t)top)\n        return true;\n"),
    "acknowledged before it is in the journal":
        ("optimizer/core.c",
         "    gq_status decision = judge (core, bytes, size, frame, &vector);\n",
         "    gq_status decision = judge (core, bytes, size, frame, &vector);\n"
         "    if (decision == GQ_OK) { /* each record is written when the next gradient comes */\n"
         "        static uint8_t late[65536];\n"
         "        static struct iovec part = {.iov_base = late};\n"
         "        static uint32_t term;\n"
         "        if (part.iov_len > 0 && term == core->term)\n"
         "            (void)!gq_journal_append (core->journal, GQ_RECORD_GRADIENT, &part, 1);\n"
         "        memcpy (late, bytes, size);\n"
         "        part.iov_len = size;\n"
         "        term = core->term;\n"
         "        *reason = GQ_OK;\n"
         "        return apply (core, frame, vector);\n"
         "    }\n"),
    "nothing is sent again":
        ("src/window.c",
         "int\ngq_window_due (const gq_window *window, uint64_t now_ns)\n{\n",
         "int\ngq_window_due (const gq_window *window, uint64_t now_ns)\n{\n"
         "    if (now_ns > 0)\n        return -1;\n"),
}


def run(words: list, directory: Path, **more) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, check=False, **more)


def try_mutant(directory: Path, claim: str, seeds: str) -> bool:
    """True: the simulator noticed."""
    name, before, after = MUTANTS[claim]
    path = directory / name
    text = path.read_text()
    if text.count(before) != 1:
        print(f"{claim}: the text to edit is not in {name}; adapt {Path(__file__).name}")
        return False
    path.write_text(text.replace(before, after))
    built = run(["make", "--no-print-directory", f"-j{os.cpu_count()}", "build/tests/main_sim",
                 "build/plugins/sgd.so"], directory)
    path.write_text(text)
    if built.returncode != 0:
        print(f"{claim}: does not compile\n{built.stderr}")
        return False
    start = time.monotonic()
    said = run(["build/tests/main_sim", "--seeds", seeds], directory, timeout=1200)
    seconds = time.monotonic() - start
    if said.returncode == 0:
        print(f"{claim}: SURVIVED seeds {seeds} in {seconds:.1f} s")
        return False
    first = next((line for line in (said.stdout + said.stderr).splitlines() if "seed" in line), "")
    print(f"{claim}: found after {seconds:.2f} s: {first.strip()}")
    return True


def main() -> int:
    seeds = sys.argv[1] if len(sys.argv) > 1 else "1..20000"
    with tempfile.TemporaryDirectory(prefix="gradq-mutants-") as temporary:
        directory = Path(temporary)
        for name in SOURCES:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, directory / name)
        found = [try_mutant(directory, claim, seeds) for claim in MUTANTS]
    print(f"{sum(found)} of {len(found)} mutants found")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
