"""The learning curve of a run: a summary in words, a sparkline, and a picture.

Usage: PYTHON gradq_curve.py RUN [--out FILE.png]
  `tools/gradq plot` and the end of `up` start it, with a Python that has matplotlib if there is
  one (`make venv`); with any other it leaves out the picture and exits with 78.

Not on a gradient's path.  Only reads metrics, and writes one picture.  Must never keep `up`, which
gives it limited time, from ending: it draws no more points than can be seen.

matplotlib comes from the venv, where TensorBoard is as well: Debian's package brings SciPy, Tk and
a compiler's worth of -dev packages with it, for a picture.
"""

import argparse
import array
import collections
import io
import json
import os
import sys

from gradq_metrics import Follower, figure

EXIT_FAILED, EXIT_CONFIG = 1, 78
WINDOW = 100  # episodes in the mean return, as in gradq_watch.py
DOTS_MAX = 20000
SPARKS = {True: "▁▂▃▄▅▆▇█", False: "_.-=+*%#"}  # can the terminal show the first?
SPARK_COLUMNS = 60


class Curve:
    """Episodes of all actors in order of time: total steps, seconds of training, return, mean."""

    def __init__(self, metrics):
        self.steps, self.seconds = array.array("q"), array.array("d")
        self.returns, self.means = array.array("d"), array.array("d")
        self.total, self.trained_s = 0, 0.0
        recent, before = collections.deque((), WINDOW), None
        follower, more = Follower(metrics), True
        while more:
            rows, more = follower.poll()
            for row in rows:
                if row.kind == "run":
                    continue
                self.total = row.steps
                # What passed before an actor's return was no training when nobody else trained:
                # the run was down, to be resumed.
                if before is not None and not row.begins:
                    self.trained_s += max(0.0, row.time - before)
                before = row.time if before is None else max(before, row.time)
                value = figure(row.values.get("return"))
                if value is not None:
                    recent.append(value)
                    self.steps.append(row.steps)
                    self.seconds.append(self.trained_s)
                    self.returns.append(value)
                    self.means.append(sum(recent) / len(recent))

    def best(self):
        """The highest mean; of whole windows, once there is one."""
        return max(self.means[min(WINDOW, len(self.means)) - 1:])


def summary(curve):
    rate = f", {curve.total / curve.trained_s:,.0f} steps/s" if curve.trained_s > 0 else ""
    return (f"{len(curve.returns):,} episodes, {curve.total:,} steps, {curve.trained_s:,.1f} s of "
            f"training{rate}; mean return of {WINDOW} episodes: best {curve.best():.1f}, last "
            f"{curve.means[-1]:.1f}")


def sparkline(curve, sparks):
    """The mean return in equal shares of the steps: of each share its last mean."""
    columns = min(SPARK_COLUMNS, len(curve.means))
    last, shares = curve.means[0], []
    first, span = curve.steps[0], max(1, curve.steps[-1] - curve.steps[0])
    index = 0
    for column in range(1, columns + 1):
        while index < len(curve.means) and (curve.steps[index] - first) * columns <= span * column:
            last = curve.means[index]
            index += 1
        shares.append(last)
    low, high = min(shares), max(shares)
    top = len(sparks) - 1
    return "".join(sparks[round((share - low) / (high - low) * top) if high > low else 0]
                   for share in shares) + f"  {low:.1f} to {high:.1f}"


def title(run):
    """Of the run's settings, what tells curves apart."""
    try:
        with open(os.path.join(run, "settings.json"), encoding="utf-8") as file:
            settings = json.load(file)
        rule = " ".join([settings["optimizer"] or "optimizer's default rule", *settings["set"]])
        return (f"{settings['env']}, {rule}, {settings['actors']} "
                f"actor{'' if settings['actors'] == 1 else 's'}, seed {settings['seed']}")
    except (OSError, ValueError, KeyError, TypeError):
        return os.path.basename(os.path.abspath(run))


def draw(curve, heading, out):
    """Returns as dots, their mean as a line: over steps, and over time.

    Without pyplot: no window, no global state, and it is there sooner."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    minutes = curve.trained_s >= 120
    unit = 60 if minutes else 1
    figure_ = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure_)
    every = max(1, -(-len(curve.returns) // DOTS_MAX))
    panels = [(curve.steps, "steps of all actors"),
              (array.array("d", [second / unit for second in curve.seconds]),
               f"{'minutes' if minutes else 'seconds'} of training")]
    for axes, (across, label) in zip(figure_.subplots(2, 1, sharey=True), panels):
        axes.plot(across[::every], curve.returns[::every], ".", markersize=2, alpha=0.35,
                  color="tab:gray", label="episode")
        axes.plot(across[::every], curve.means[::every], color="tab:blue",
                  label=f"mean of the last {WINDOW}")
        axes.set_xlabel(label)
        axes.set_ylabel("return")
        axes.grid(alpha=0.3)
    figure_.axes[0].legend(loc="best")
    figure_.suptitle(heading)
    # Whole or not at all, whatever goes wrong while it is drawn.
    picture = io.BytesIO()
    figure_.savefig(picture, format=os.path.splitext(out)[1][1:] or "png", dpi=110)
    with open(out, "wb") as file:
        file.write(picture.getbuffer())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--out", metavar="FILE", help="picture; its ending says the format "
                                                      "(RUN/summary.png)")
    options = parser.parse_args()
    out = options.out or os.path.join(options.run, "summary.png")
    curve = Curve(os.path.join(options.run, "metrics"))
    if not curve.returns:
        print("no episode has ended yet: there is no curve", file=sys.stderr)
        return EXIT_FAILED
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    print(summary(curve))
    print("return " + sparkline(curve, SPARKS[unicode]), flush=True)
    try:
        draw(curve, title(options.run), out)
    except ImportError:
        print("no picture: it needs matplotlib, which `make venv` puts into build/venv; then "
              "`tools/gradq plot` draws it", file=sys.stderr)
        return EXIT_CONFIG
    except (OSError, ValueError) as error:
        print(f"no picture: {out}: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"picture: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
