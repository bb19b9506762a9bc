"""Settings that --net brings with it (tools/gradq_run.py): they stand under what is given."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from gradq_run import DEFAULTS, RECIPES, with_recipe  # noqa: E402


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("GRADQ_OPTIMIZER", "GRADQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def settings(**given):
    return {**DEFAULTS, **given}


@pytest.mark.parametrize("net", [None, "dense", "my-own"])
def test_other_nets_change_nothing(net):
    assert with_recipe(settings(net=net)) == settings(net=net)


def test_pixels_bring_the_rule_and_how_actors_learn():
    result, recipe = with_recipe(settings(net="conv-lstm")), RECIPES["conv-lstm"]
    assert (result["optimizer"], result["set"]) == (recipe["optimizer"], recipe["set"])
    assert result["actor_option"] == recipe["actor_option"]
    assert with_recipe(result) == result  # as --resume does


def test_what_was_given_wins_word_by_word():
    result = with_recipe(settings(net="conv-lstm", set=["lr=1e-5"],
                                  actor_option=["envs-per-actor=2", "gamma=0.9"]))
    keys = [word.partition("=")[0] for word in result["set"] + result["actor_option"]]
    assert len(keys) == len(set(keys))
    assert "lr=1e-5" in result["set"] and "clip_norm=40" in result["set"]
    assert {"envs-per-actor=2", "gamma=0.9", "reduction=sum"} <= set(result["actor_option"])


def test_another_rule_or_another_actor_is_left_alone(monkeypatch):
    assert with_recipe(settings(net="conv-lstm", optimizer="rmsprop"))["set"] == []
    own = settings(net="conv-lstm", actor="python3 mine.py")
    assert with_recipe(own) == own
    for elsewhere in (settings(net="conv-lstm", optimizer_option=["config=rule.ini"]),):
        assert with_recipe(elsewhere)["optimizer"] is None
    monkeypatch.setenv("GRADQ_OPTIMIZER", "sgd")
    assert with_recipe(settings(net="conv-lstm"))["optimizer"] is None
