"""A line of JSON for each episode, as tools/gradq reads them: see ../README.md."""
import json
import os
import time


class Metrics:
    """path: a file to append to; None: GRADQ_METRICS, and none at all where that is not set."""

    def __init__(self, actor: int, path: str = None):
        self.actor, self.steps, self.episodes = actor, 0, 0
        path = path or os.environ.get("GRADQ_METRICS")
        # Each line is one write, so that a reader, or a kill, meets no half of one.
        self.file = open(path, "ab", buffering=0) if path else None

    def episode(self, total_reward: float, length: int, version: int):
        """One has ended, after `length` steps."""
        self.steps += length
        self.episodes += 1
        if self.file is not None:
            line = {"time": round(time.time(), 3), "actor": self.actor, "steps": self.steps,
                    "episode": self.episodes, "return": total_reward, "length": length,
                    "version": version}
            self.file.write(json.dumps(line).encode() + b"\n")
