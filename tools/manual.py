#!/usr/bin/python3
"""Manual pages and bash completion, from what the programs say to --help and from nothing else.

Usage: tools/manual.py BUILD OUT      writes OUT/man/man1, man3 and man7, OUT/bash-completion

src/option_table.c is the only home of a program's option and the parser of tools/gradq that of a
command's, so none of help, page and completion can say something that the others do not.
"""
import argparse
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/gradq/gradq.h"
# Values that name files; words of the metavariable of an option.
PATHS = {"FILE": "-f", "FILE.so": "-f", "DIR": "-d", "COMMAND": "-c"}


class Option(NamedTuple):
    flags: list   # ["--json", "--no-json"]
    value: str    # "FILE", "auto|inline|shm"; "" for a flag
    text: list    # paragraphs


class Page(NamedTuple):
    name: str     # gradq-broker
    usage: str
    summary: str
    options: list
    rest: list    # paragraphs behind the options


# ---- what there is ----

def option_of(head: str, lines: list) -> Option:
    """Of "--json, --no-json" or "--window N", and the lines of explanation."""
    flags = re.findall(r"--[a-z0-9-]+", head)
    value = head.partition(" ")[2] if len(flags) == 1 else ""
    facts = next((i for i, line in enumerate(lines) if line.startswith("[")), len(lines))
    return Option(flags, value, [" ".join(each) for each in (lines[:facts], lines[facts:]) if each])


def page_of(text: str) -> Page:
    """From a program's --help: src/option_help.c writes it, in columns."""
    blocks = text.strip("\n").split("\n\n")
    usage, summary = blocks[0].split("\n", 1)
    heads = []
    for line in blocks[1].split("\n"):
        head = re.match(r"  (--[a-z0-9-]+(?:, --[a-z0-9-]+| \S+)?)(?: +(.*))?$", line)
        if head:
            heads.append((head[1], [head[2]] if head[2] else []))
        else:
            heads[-1][1].append(line.strip())
    return Page(usage.split()[1], usage.partition(": ")[2], " ".join(summary.split()),
                [option_of(*each) for each in heads],
                [" ".join(each.split()) for each in blocks[2:]])


def help_of(build: Path, program: str) -> str:
    # Settings of the user's own environment must not show up as defaults in a page.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRADQ_")}
    done = subprocess.run([build / program, "--help"], env=env, capture_output=True, text=True,
                          timeout=60, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"{program} --help ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def program_pages(build: Path) -> list:
    names = {path.stem for path in ROOT.glob("tools/gradq-*.c")}
    names |= {"gradq-broker", "gradq-optimizer", "gradq-actor"}
    return [page_of(help_of(build, name)) for name in sorted(names)]


def parser_of_gradq() -> argparse.ArgumentParser:
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("gradq_command", str(ROOT / "tools/gradq"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module.command_line()


def command_page(parser: argparse.ArgumentParser) -> Page:
    """Of a command of tools/gradq."""
    options, usage = [], parser.prog
    for action in parser._actions:  # argparse has no public list of them
        value = ("" if action.nargs == 0 else action.metavar or
                 "|".join(map(str, action.choices or [])) or action.dest.upper())
        if action.option_strings:
            options.append(Option([flag for flag in action.option_strings if flag != "-h"], value,
                                  [action.help] if action.help else []))
        else:
            usage += f" {value}"
    return Page(parser.prog, f"{usage} [OPTION]...", parser.description, options, [])


def gradq_pages() -> tuple:
    """(page of gradq itself, those of its commands)."""
    parser = parser_of_gradq()
    group = next(action for action in parser._actions
                 if isinstance(action, argparse._SubParsersAction))
    shown = [action.dest for action in group._choices_actions]
    whole = Page("gradq", "gradq COMMAND [OPTION]...", parser.description,
                 [Option(["--help"], "", ["show the commands"])], [parser.epilog])
    return whole, [command_page(group.choices[name]) for name in shown]


# ---- manual pages ----

def roff(text: str) -> str:
    """Text that roff shows as it stands."""
    for plain, escaped in (("\\", "\\e"), ("-", "\\-"), ("'", "\\(aq"), ("`", "\\(ga"),
                           ("^", "\\(ha"), ("~", "\\(ti")):
        text = text.replace(plain, escaped)
    return re.sub(r"^\.", r"\\&.", text, flags=re.MULTILINE)


def roff_option(option: Option) -> list:
    lines = [".TP", ", ".join(f"\\fB{roff(flag)}\\fR" for flag in option.flags)
             + (f" \\fI{roff(option.value)}\\fR" if option.value else "")]
    for index, text in enumerate(option.text):
        lines += [".br"] * (index > 0) + [roff(text)]
    return lines


def title(name: str, section: int, version: str, what: str) -> list:
    return [f'.TH {roff(name).upper()} {section} "" "gradq {version}" "gradq"', ".SH NAME",
            f"{roff(name)} \\- {roff(what)}"]


def what(page: Page) -> str:
    text = page.summary.rstrip(".").removeprefix(f"{page.name}: ")
    return text[0].lower() + text[1:]


def manual(page: Page, commands: list, version: str) -> str:
    lines = [*title(page.name, 1, version, what(page)), ".SH SYNOPSIS", roff(page.usage)]
    for command in commands:
        lines += [".br", roff(command.usage)]
    lines += [".SH OPTIONS", *(line for option in page.options for line in roff_option(option))]
    if commands:
        lines.append(".SH COMMANDS")
    for command in commands:
        summary = command.summary[0].upper() + command.summary[1:]
        lines += [f".SS {roff(command.usage)}", roff(f"{summary}."),
                  *(line for option in command.options for line in roff_option(option))]
    lines.append(".SH NOTES")
    for text in page.rest:
        lines += [".PP", roff(text)]
    return "\n".join([*lines, ".SH SEE ALSO", ".BR gradq (7)", ""])


def client_manual(version: str) -> str:
    """gradq.h explains itself; the page shows it."""
    return "\n".join([
        *title("gradq", 3, version, "push gradients, take whole versions of the weights"),
        ".SH SYNOPSIS", ".nf", roff("#include <gradq/gradq.h>"),
        roff("cc actor.c $(pkg-config --cflags --libs gradq)"), ".fi", ".SH DESCRIPTION",
        "The header, which says what each call does, owns and answers:", ".PP", ".nf",
        roff(HEADER.read_text().rstrip("\n")), ".fi", ".SH SEE ALSO",
        ".BR gradq (7), gradq (1)", ""])


# ---- completion ----

def value_words(option: Option) -> str:
    """How compgen finds values: words, or files; "-W ''" for what nobody knows."""
    if re.fullmatch(r"[a-z0-9-]+(\|[a-z0-9-]+)+", option.value):
        return "-W '" + option.value.replace("|", " ") + "'"
    return PATHS.get(option.value.split("|")[-1], "-W ''")


COMPLETION = r"""# bash completion of gradq and its programs; tools/manual.py wrote it from --help.

# What a program or a command takes.
_gradq_words () {
    case $1 in
%s
    esac
}

# How compgen finds values of an option.
_gradq_values () {
    case $1 in
%s
    esac
}

_gradq () {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local name=${COMP_WORDS[0]##*/} values
    COMPREPLY=()
    # --name=value comes as three words.
    if [ "$current" = = ]; then
        current=
    elif [ "$before" = = ] && [ "$COMP_CWORD" -gt 2 ]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    if [ "$name" = gradq ] && [ "$COMP_CWORD" -gt 1 ]; then
        name="gradq ${COMP_WORDS[1]}"
    fi
    values=$(_gradq_values "$name $before")
    if [ -n "$values" ]; then
        case $values in -[df]) compopt -o filenames 2>/dev/null ;; esac
        eval "mapfile -t COMPREPLY < <(compgen $values -- \"\$current\")"
    else
        mapfile -t COMPREPLY < <(compgen -W "$(_gradq_words "$name")" -- "$current")
    fi
}

complete -F _gradq %s
"""


def completion(pages: list, commands: list) -> str:
    words = {page.name: [flag for option in page.options for flag in option.flags]
             for page in pages + commands}
    words["gradq"] = [command.name.split()[1] for command in commands] + words["gradq"]
    values = [(f"{page.name} {flag}", value_words(option)) for page in pages + commands
              for option in page.options for flag in option.flags if option.value]
    return COMPLETION % (
        "\n".join(f"    '{name}') echo '{' '.join(each)}' ;;" for name, each in words.items()),
        "\n".join(f"    '{name}') echo \"{each}\" ;;" for name, each in values),
        " ".join(page.name for page in pages))


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    build, out = Path(sys.argv[1]), Path(sys.argv[2])
    version = re.search(r'#define GQ_VERSION_STRING "(.*)"', HEADER.read_text())[1]
    try:
        gradq, commands = gradq_pages()
        pages = [gradq, *program_pages(build)]
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"manual: {error}; build first (make)", file=sys.stderr)
        return 1
    for section in ("man1", "man3", "man7"):
        (out / "man" / section).mkdir(parents=True, exist_ok=True)
    for page in pages:
        (out / "man/man1" / f"{page.name}.1").write_text(
            manual(page, commands if page is gradq else [], version))
    (out / "man/man3/gradq.3").write_text(client_manual(version))
    shutil.copyfile(ROOT / "docs/gradq.7", out / "man/man7/gradq.7")
    (out / "bash-completion").write_text(completion(pages, commands))
    return 0


if __name__ == "__main__":
    sys.exit(main())
