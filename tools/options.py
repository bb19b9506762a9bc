#!/usr/bin/python3
"""docs/OPTIONS.md from what each program says to --help, and from nothing else.

Usage: tools/options.py [--check]

src/option_table.c is the only home of an option; --help prints it and this page repeats --help, so
none of the three can say something that the others do not.  --check compares and writes nothing.
"""
import difflib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/OPTIONS.md"
# In the order in which a reader meets them.
FIRST = ("gradq-broker", "gradq-optimizer", "gradq-actor", "gradq-top")
OPENING = """\
# Options
Written by `make options` from each program's `--help`; `make lint` refuses a page that is not
current.
"""


def program_names() -> list:
    names = {path.stem for path in ROOT.glob("tools/gradq-*.c")}
    names |= {f"gradq-{part}" for part, folder in (("broker", "broker"), ("optimizer", "optimizer"),
                                                   ("actor", "actors"))
              if (ROOT / folder / "main.c").exists()}
    rank = {name: index for index, name in enumerate(FIRST)}
    return sorted(names, key=lambda name: (rank.get(name, len(FIRST)), name))


def help_of(program: str) -> str:
    # Settings of the user's own environment must not show up as defaults in the page.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRADQ_")}
    done = subprocess.run([ROOT / "build" / program, "--help"], env=env, capture_output=True,
                          text=True, timeout=10, stdin=subprocess.DEVNULL)
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"{program} --help ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def page() -> str:
    parts = [OPENING]
    for program in program_names():
        text = "\n".join(line.rstrip() for line in help_of(program).strip("\n").split("\n"))
        parts.append(f"\n## {program}\n```\n{text}\n```\n")
    return "".join(parts)


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        new = page()
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"docs/OPTIONS.md: {error}; build first (make)", file=sys.stderr)
        return 1
    if not sys.argv[1:]:
        PAGE.write_text(new)
        return 0
    old = PAGE.read_text() if PAGE.exists() else ""
    if old == new:
        return 0
    sys.stderr.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True),
                                               "docs/OPTIONS.md", "--help"))
    print("docs/OPTIONS.md differs from --help; type make options", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
