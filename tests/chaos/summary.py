"""What a whole run of the chaos runner did, and whether that was enough."""
from collections import Counter
from typing import NamedTuple

CRASHES = {  # name: highest N of "die at pass N" that a short life is likely to reach
    "after-receive": 60, "appending": 120, "before-apply": 60, "before-publish": 60,
    "recovering": 20, "checkpointing": 2, "stepping": 5000, "before-commit": 60, "committing": 60,
    "after-commit": 60}
# Of a whole `make chaos`: 20 seeds of 20 s.  A shorter one has to come to its share.
WHOLE_S, KILLS_WANTED = 400, 500
SHORT_S = 200  # below this, chance may leave out a crash point


class Result(NamedTuple):
    seed: int
    wrong: list
    counts: Counter
    found: dict
    progress_s: float


def shortcomings(counts: Counter, found: Counter, modes: list, disturbed_s: float) -> list:
    """What a run of this length should have done and did not."""
    short = []
    wanted = int(KILLS_WANTED * min(1, disturbed_s / WHOLE_S))
    if disturbed_s < SHORT_S:
        return short
    for kind in ("broker", "optimizer", "client"):
        if counts["kill " + kind] < wanted:
            short.append(f"only {counts['kill ' + kind]} kills of the {kind}, not {wanted}")
    short += [f"crash point {name} was never reached" for name in CRASHES
              if not counts["crash " + name]]
    short += [f"no {name}" for name, count in (
        ("swap of rules", found["swaps"]), ("gradient was only named", found["named"]),
        ("segment was recycled", found["recycled"]),
        ("stop of the optimizer", counts["stop optimizer"]),
        ("link cut", counts["cut"] or "cut" not in modes),
        ("hole in a link", counts["hole"] or "cut" not in modes)) if not count]
    return short


def summarise(results: list, modes: list, seconds: float) -> bool:
    """Print what was done, over all; false: not enough, or not all well."""
    counts, found = Counter(), Counter()
    for result in results:
        counts.update(result.counts)
        found.update(result.found)
    print(f"== {len(results)} seeds, {len(results) * seconds:g} s of faults")
    for name in sorted(counts):
        print(f"{name:24}{counts[name]:8}")
    for name in ("records", "promised", "refused", "looks", "checkpoints", "terms", "swaps",
                 "named", "segments", "recycled"):
        print(f"{name:24}{found[name]:8}")
    worst = max((each.progress_s for each in results if each.progress_s is not None), default=None)
    print("worst time to progress  " + ("none" if worst is None else f"{worst:6.2f} s"))
    bad = [str(each.seed) for each in results if each.wrong]
    short = shortcomings(counts, found, modes, len(results) * seconds)
    for each in short:
        print(f"NOT ENOUGH: {each}")
    if not bad:
        print("lost 0, doubled 0, torn 0")
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed"
          + (f": seeds {' '.join(bad)}" if bad else ""))
    return not bad and not short
