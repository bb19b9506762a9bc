"""An agent learns while its processes are killed: a short form of tests/chaos/learning.py."""
import os
import random
import sys
from pathlib import Path

from conftest import SLOW

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "chaos"))
from learning import KINDS, learn  # noqa: E402

SEED = int(os.environ.get("SEED") or random.randrange(1, 1 << 20))


def test_a_run_whose_processes_are_killed_again_and_again_still_solves(build, run_dir):
    print(f"SEED={SEED}")
    # The whole task: it lasts for a dozen kills, so that each kind of process has its turn.
    wrong, said, kills, seconds = learn(build, run_dir / "run", SEED, actors=2, target=475,
                                        every=0.2, first=0, limit=240 * SLOW)
    print(said)
    print(f"{kills} in {seconds:.1f} s")
    assert not wrong, wrong
    assert all(kills[kind] > 0 for kind in KINDS), kills
