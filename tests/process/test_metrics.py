"""The rows that actors write about themselves, of a run whose actors play several games each."""

import json
import math
import subprocess
from pathlib import Path

from conftest import SLOW

TREE = Path(__file__).resolve().parents[2]
FIGURES = ("policy_loss", "value_loss", "entropy", "gradient_norm", "steps_per_s")
GAMES, ACTORS = 3, 2


def test_rows_come_in_the_order_of_their_steps_and_agree_with_each_other(build, run_dir):
    run = run_dir / "run"
    answer = subprocess.run(
        [TREE / "tools/gradq", "up", "--build", build, "--run", run, "--env", "Pong",
         "--net", "conv-lstm", "--actor-option", f"envs-per-actor={GAMES}", "--no-tensorboard",
         "--actors", str(ACTORS), "--max-steps", "6000", "--wait-s", str(60 * SLOW)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300 * SLOW, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    total = 0
    for actor in range(ACTORS):
        text = (run / f"metrics/actor-{actor}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        episodes = [row for row in rows if "return" in row]
        training = [row for row in rows if "return" not in row]
        assert episodes and training
        # Whoever reads them takes fewer steps, or fewer episodes, for a new life of the actor.
        for key in ("time", "steps", "version"):
            values = [row[key] for row in rows]
            assert values == sorted(values), key
        counts = [row["episode"] if "return" in row else row["episodes"] for row in rows]
        assert counts == sorted(counts) and counts[-1] == len(episodes)
        for row in training:
            assert all(math.isfinite(row[key]) for key in FIGURES), row
            assert row["gradient_norm"] > 0 and row["entropy"] > 0 and row["staleness"] >= 0
        # Games side by side: what has ended was played, and of each game at most one has not.
        ended = sum(row["length"] for row in episodes)
        assert ended <= episodes[-1]["steps"]
        assert all(-21 <= row["return"] <= 21 for row in episodes)
        total += ended
    assert total >= 6000
