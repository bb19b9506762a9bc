"""Supervised: handwritten digits of scikit-learn (1,797 pictures of 8 x 8 pixels), in PyTorch.

    tools/gradq up --actors 2 --actor 'python3 actors/python/examples/digits.py' --target-return 90

Each copy draws its own batches.  An "episode" is an epoch: its return is the accuracy on held-out
pictures in percent, its length the number of batches.
"""
import os
import signal
import sys

import torch
from sklearn.datasets import load_digits

from gradq.torch import RemoteOptimizer
from metrics import Metrics

BATCH, HELD_OUT = 64, 360


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the `with` below in order
    number = os.environ.get("GRADQ_ACTOR")
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("GRADQ_SEED", "1")) * 10_007 + int(number or 0))
    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures / 16, dtype=torch.float32), torch.tensor(labels)
    (x, held_x), (y, held_y) = x.split([len(x) - HELD_OUT, HELD_OUT]), y.split(
        [len(y) - HELD_OUT, HELD_OUT])

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    with RemoteOptimizer(model.named_parameters(), samples=BATCH,
                         actor=None if number is None else int(number)) as optimizer:
        metrics = Metrics(optimizer.client.actor)
        while True:
            batches = torch.randperm(len(x)).split(BATCH)
            for batch in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                right = (model(held_x).argmax(1) == held_y).float().mean()
            metrics.episode(100 * float(right), len(batches), optimizer.version)


if __name__ == "__main__":
    main()
