"""Supervised: handwritten digits of scikit-learn (1,797 pictures of 8 x 8 pixels), in PyTorch.

    tools/gradq up --actors 2 --actor 'python3 actors/python/examples/digits.py' --target-return 90
    python3 actors/python/examples/digits.py --epochs 20   # alone, with torch.optim.Adam

Each copy draws its own batches.  An "episode" is an epoch: its return is the accuracy on held-out
pictures in percent, its length the number of batches.  Without GRADQ_ADDRESS there is no run, and
the rule is a local one.
"""
import argparse
import contextlib
import itertools
import os
import signal
import sys

import torch
from sklearn.datasets import load_digits

from gradq.torch import RemoteOptimizer
from metrics import Metrics

BATCH, HELD_OUT, LOCAL_LR = 64, 360, 3e-3


def optimizer_of(model, actor):
    """Of the run at GRADQ_ADDRESS, or, without one, local, which needs no closing."""
    if "GRADQ_ADDRESS" in os.environ:
        return RemoteOptimizer(model.named_parameters(), samples=BATCH, actor=actor)
    return contextlib.nullcontext(torch.optim.Adam(model.parameters(), LOCAL_LR))


def main():
    parser = argparse.ArgumentParser(description="Learn scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, help="to end after; default: until it is stopped")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # leaves the `with` below in order
    number = os.environ.get("GRADQ_ACTOR")
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("GRADQ_SEED", "1")) * 10_007 + int(number or 0))
    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures / 16, dtype=torch.float32), torch.tensor(labels)
    (x, held_x), (y, held_y) = x.split([len(x) - HELD_OUT, HELD_OUT]), y.split(
        [len(y) - HELD_OUT, HELD_OUT])

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    with optimizer_of(model, None if number is None else int(number)) as optimizer:
        remote = isinstance(optimizer, RemoteOptimizer)
        metrics = Metrics(optimizer.client.actor if remote else 0)
        for epoch in itertools.count(1):
            batches = torch.randperm(len(x)).split(BATCH)
            for batch in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                right = (model(held_x).argmax(1) == held_y).float().mean()
            metrics.episode(100 * float(right), len(batches), optimizer.version if remote else 0)
            if epoch == options.epochs:
                print(f"accuracy {100 * float(right):.2f} % after {epoch} epochs")
                break


if __name__ == "__main__":
    main()
