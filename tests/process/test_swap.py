"""Another update rule takes over a run under load: what the rule before it remembers is in every
checkpoint from then on, bit for bit, and is gone on with when that rule comes back."""
import json

import pytest

from conftest import wait_for
from peer import checkpoint, checkpoints, events, kill, opened
from peer import service  # noqa: F401
from test_kill import acknowledged, applied_once, endless

ADAM = ("--optimizer", "adam", "--set", "lr=1e-3")
SGD = ("--optimizer", "sgd", "--set", "lr=1e-3", "--set", "momentum=0.9")
KEEP = ("--checkpoint-interval-s", "0", "--checkpoints-kept", "50", "--journal", "keep")
CLIENTS = 2


def get_on(service, version=0):
    """Behind `version`: what the broker last heard may be of the optimizer before."""
    service.until(lambda s: (s["optimizer"]["version"] or 0) > version, "steps of this rule")
    for i in range(CLIENTS):
        acknowledged(service, i, acknowledged(service, i)["acknowledged"] + 50)


def swap(service, end: str, rule: tuple) -> tuple:
    """End the optimizer and start another rule, while clients push.  The last checkpoint of the old
    rule (None after a kill) and the first of the new one, which may be the same file."""
    before = None
    if end == "stop":
        assert service.optimizer.stop() == 0
        before = checkpoint(service.run, checkpoints(service.run)[-1])
    else:
        kill(service.optimizer)
    service.start_optimizer("--resume", *rule, *KEEP)
    log = service.optimizer
    written = wait_for(lambda: events(log.stderr, "checkpoint written"), 20, "a first checkpoint")
    return before, checkpoint(service.run, written[0]["version"])


def expect_kept(tensors: dict, meta: dict, old: tuple):
    """The retired state in a checkpoint is that of the rule in another one."""
    retired = json.loads(meta["retired"])
    assert retired["optimizer"] == old[1]["optimizer"]
    assert retired["optimizer_steps"] == int(old[1]["optimizer_steps"])
    assert dict(retired["scalars"]) == {key.removeprefix("scalar."): value
                                        for key, value in old[1].items()
                                        if key.startswith("scalar.")}
    for slot in retired["slots"]:
        kept = tensors[f"retired.{retired['optimizer']}.{slot}.w"]
        assert kept.any(), "zeros would equal anything"
        assert kept.tobytes() == old[0][f"{slot}.w"].tobytes(), slot


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_adam_sgd_adam_under_load_goes_on_with_the_moments_and_loses_nothing(service, end):
    service.up(*ADAM, *KEEP)
    clients = [opened(endless(service, i)) for i in range(CLIENTS)]
    get_on(service)
    adam, first = swap(service, end, SGD)
    assert first[1]["optimizer"] == "sgd" and first[1]["optimizer_steps"] == "0"
    if adam is not None:
        assert first[1]["version"] == adam[1]["version"], "before any gradient is taken"
        expect_kept(*first, adam)
    get_on(service, int(first[1]["version"]))

    sgd, second = swap(service, end, ADAM)
    if sgd is not None:
        expect_kept(*second, sgd)
        expect_kept(*sgd, adam)  # carried on in the checkpoints in between
    kept = json.loads(first[1]["retired"])
    assert second[1]["optimizer"] == "adam" and kept["slots"] == ["exp_avg", "exp_avg_sq"]
    assert int(second[1]["optimizer_steps"]) == kept["optimizer_steps"] > 0
    for slot in kept["slots"]:
        assert second[0][f"{slot}.w"].tobytes() == first[0][f"retired.adam.{slot}.w"].tobytes()
    for scalar, value in kept["scalars"]:
        assert second[1]["scalar." + scalar] == value
    get_on(service, int(second[1]["version"]))

    applied_once(service, clients)  # and gradq-replay --verify agrees with every checkpoint
    last = checkpoints(service.run)[-1]
    meta = checkpoint(service.run, last)[1]
    steps = last - int(second[1]["version"])
    assert steps > 0 and int(meta["optimizer_steps"]) == kept["optimizer_steps"] + steps
