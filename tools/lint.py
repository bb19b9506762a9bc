#!/usr/bin/python3
"""House rules that a program can check; `make lint` builds and then runs it.

Usage: tools/lint.py [CHECK ...]

  layout     clang-format agrees with every C file
  tidy       clang-tidy, with the families and exceptions of .clang-tidy
  cppcheck   cppcheck's warnings
  lengths    functions of at most 70 lines, lines of at most 100 columns, no tabs
  openings   every C file begins with a comment that gives its place
  includes   include <- src <- {broker, optimizer, actors, tools}, plug-ins see public headers only
  options    docs/OPTIONS.md is what --help says
  scripts    Python and shell files parse

A finding begins with `file:line:`, and the exit status is 1 when there is any.
"""
import ast
import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100
CODE_FOLDERS = ("include", "src", "broker", "optimizer", "actors", "tools", "tests")
CLANG_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Iinclude", "-Isrc", "-I."]
# One file; the slowest needs 8 s, on a machine that has nothing else to do.
TOOL_S = 300
# Who may include whom.  Tests may include everything.
MAY_INCLUDE = {
    "include": {"include"},
    "src": {"include", "src"},
    "broker": {"include", "src", "broker"},
    "optimizer": {"include", "src", "optimizer"},
    "optimizer/plugins": {"include"},
    "actors": {"include", "src", "actors"},
    # gradq-replay does what a starting optimizer does, with its parts.
    "tools": {"include", "src", "tools", "optimizer"},
}


def files(*suffixes: str) -> list:
    found = [path for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*"))
             if path.suffix in suffixes and path.is_file()]
    return [path.relative_to(ROOT) for path in found]


def python_files() -> list:
    """By suffix or first line: tools/gradq has no suffix."""
    return [path for path in files("", ".py")
            if path.suffix == ".py" or (ROOT / path).read_bytes().startswith(b"#!/usr/bin/python3")]


def shell_files() -> list:
    return [path for path in files("", ".sh") + [Path(".ci/run")]
            if re.match(rb"#!.*/(ba)?sh|#!.* bash", (ROOT / path).read_bytes()[:100])]


def tool(command: list) -> list:
    """What a tool has to say, as findings; nothing when it exits with 0."""
    try:
        done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True,
                              text=True, timeout=TOOL_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return [f"{command[0]} is not installed; type tools/setup.sh lint"]
    except subprocess.TimeoutExpired:
        return [f"{command[-1]}: {command[0]} did not end within {TOOL_S} s"]
    if done.returncode == 0:
        return []
    text = (done.stdout + done.stderr).replace(f"{ROOT}/", "")
    lines = [line for line in text.splitlines() if not re.match(r"\d+ warnings? generated", line)]
    return lines or [f"{' '.join(map(str, command))}: exit {done.returncode}"]


def on_all_cores(commands: list) -> list:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [finding for findings in pool.map(tool, commands) for finding in findings]


def check_layout() -> list:
    return on_all_cores([["clang-format-14", "--dry-run", "-Werror", path]
                         for path in files(".c", ".h")])


def check_tidy() -> list:
    # src/status.c defines what analyzer.h wraps.
    return on_all_cores([["clang-tidy-14", "--quiet", path, "--", *CLANG_FLAGS,
                          *(["-include", "tools/analyzer.h"] if path.name != "status.c" else [])]
                         for path in files(".c")])


def check_cppcheck() -> list:
    # Tests are left to clang-tidy: cppcheck takes Criterion's Test () for a syntax error.
    # varFuncNullUB: NULL after the last argument is a null pointer wherever glibc is.
    folders = [folder for folder in CODE_FOLDERS if folder not in ("include", "tests")]
    return tool(["cppcheck", "--quiet", "--error-exitcode=1", "--std=c11", "--inline-suppr",
                 "--enable=warning,performance,portability", "--suppress=missingIncludeSystem",
                 "--suppress=varFuncNullUB",
                 "--template={file}:{line}: {message} [{id}]", "-D_GNU_SOURCE", "-Iinclude",
                 "-Isrc", "-I.", *[folder for folder in folders if (ROOT / folder).is_dir()]])


def long_c_functions(path: Path, lines: list) -> list:
    """House layout puts a function's braces, and only those, in the first column."""
    findings, start = [], None
    for number, line in enumerate(lines, 1):
        if line == "{":
            start = number
        elif line.startswith("}") and start is not None:
            length = number - start + 1
            if length > FUNCTION_LINES_MAX:
                findings.append(f"{path}:{start}: a function of {length} lines, more than"
                                f" {FUNCTION_LINES_MAX}")
            start = None
    return findings


def long_python_functions(path: Path, text: str) -> list:
    return [f"{path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines,"
            f" more than {FUNCTION_LINES_MAX}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX]


def bad_lines(path: Path, lines: list) -> list:
    findings, laid_out = [], True
    for number, line in enumerate(lines, 1):
        # Tables that clang-format leaves alone may be as wide as their rows.
        if "clang-format off" in line or "clang-format on" in line:
            laid_out = "clang-format on" in line
        if len(line) > COLUMNS_MAX and laid_out:
            findings.append(f"{path}:{number}: {len(line)} columns, more than {COLUMNS_MAX}")
        if "\t" in line:
            findings.append(f"{path}:{number}: a tab")
    return findings


def check_lengths() -> list:
    findings = []
    c_files, python = files(".c", ".h"), python_files()
    for path in c_files + python + shell_files():
        text = (ROOT / path).read_text()
        lines = text.splitlines()
        findings += bad_lines(path, lines)
        if path in c_files:
            findings += long_c_functions(path, lines)
        elif path in python:
            try:
                findings += long_python_functions(path, text)
            except SyntaxError:
                pass  # check_scripts says so
    return findings


def check_openings() -> list:
    return [f"{path}:1: no comment that says the file's step and what it must never do"
            for path in files(".c", ".h") if not (ROOT / path).read_text().startswith("/*")]


def included(path: Path, name: str):
    """The file that #include "name" means, as the compiler searches for it; None: not ours."""
    for folder in (path.parent, Path("include"), Path("src"), Path(".")):
        target = ROOT / folder / name
        if target.is_file():
            return target.resolve().relative_to(ROOT)
    return None


def check_includes() -> list:
    findings = []
    for path in files(".c", ".h"):
        folder = path.parts[0]
        if path.parts[:2] == ("optimizer", "plugins"):
            folder = "optimizer/plugins"
        if folder not in MAY_INCLUDE:
            continue
        lines = (ROOT / path).read_text().splitlines()
        for number, line in enumerate(lines, 1):
            match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
            target = included(path, match[1]) if match else None
            if target and target.parts[0] not in MAY_INCLUDE[folder]:
                findings.append(f"{path}:{number}: {folder} must not include {target}; it may"
                                f" include {', '.join(sorted(MAY_INCLUDE[folder]))}")
    return findings


def check_options() -> list:
    return tool(["/usr/bin/python3", "tools/options.py", "--check"])


def check_scripts() -> list:
    findings = []
    for path in python_files():
        try:
            compile((ROOT / path).read_text(), str(path), "exec")
        except SyntaxError as error:
            findings.append(f"{path}:{error.lineno}: {error.msg}")
    for path in shell_files():
        shell = "bash" if b"bash" in (ROOT / path).read_bytes()[:100].split(b"\n")[0] else "sh"
        findings += tool([shell, "-n", path])
    return findings


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}


def main() -> int:
    wanted = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        print(f"lint: {unknown[0]} is none of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in wanted:
        findings = CHECKS[name]()
        failed += bool(findings)
        print("\n".join([*findings, f"lint: {name}: {'FAILED' if findings else 'clean'}"]),
              flush=True)
    print(f"{len(wanted) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
