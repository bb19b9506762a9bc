"""What a seed of the chaos runner chooses: rules and their settings, and the options of a run."""
import random

LARGE_HALF = 50_000  # elements in each of two tensors: 400 KB a gradient, 160 fill a segment
SMALL_HALF = 32
MIDDLE_HALF = 600       # more than a page: those of lane inline go by the hop
SWAPPED_IN = 3  # one seed in three changes rules
LARGE_IN = 5    # one in five has a large layout


def host_settings(chance: random.Random, count: int) -> list:
    """Clipping around the length that gradients have, and a schedule."""
    words = []
    clip = chance.choice((0, 0.5, 0.9, 1.05))
    if clip:
        words.append(f"clip_norm={clip * (count / 3) ** 0.5:.4g}")  # of uniform numbers in -1 .. 1
    schedule = chance.choice(("constant", "linear", "cosine"))
    if schedule != "constant":
        words += [f"schedule={schedule}", f"schedule_steps={chance.choice((3000, 50_000))}"]
    warmup = chance.choice((0, 0, 100, 1000))
    return words + ([f"warmup_steps={warmup}"] if warmup else [])


def rule(chance: random.Random, name: str, count: int) -> list:
    """NAME KEY=VALUE..."""
    pick = chance.choice
    own = {
        "sgd": [f"lr={pick((0.01, 0.003))}", f"momentum={pick((0, 0.9, 0.5))}",
                f"nesterov={pick(('false', 'true'))}"],
        "adam": [f"lr={pick((0.001, 0.01))}", f"beta2={pick((0.999, 0.95))}",
                 f"epsilon={pick(('torch', 'tensorflow'))}", f"weight_decay={pick((0, 0.01))}"],
        "adamw": [f"lr={pick((0.001, 0.01))}", f"weight_decay={pick((0.01, 0.1))}"],
        "rmsprop": [f"lr={pick((0.001, 0.01))}", f"epsilon={pick(('inside', 'outside'))}",
                    f"momentum={pick((0, 0.9))}"],
        "adagrad": [f"lr={pick((0.01, 0.1))}", f"eps={pick((0, 1e-10))}",
                    f"initial_accumulator_value={pick((0, 0.1))}"],
        "lion": [f"lr={pick((0.0001, 0.001))}", f"weight_decay={pick((0, 0.1))}"]}
    return [name, *own[name], *host_settings(chance, count)]


def steps(chance: random.Random) -> dict:
    """How gradients become steps; a swap of the rule changes this too."""
    staleness = chance.choice(("inf", "inf", 1, 4, 16))
    return {"aggregate": chance.choice((1, 1, 2, 3, 4)),
            "aggregate-weights": chance.choice(("equal", "samples")),
            "max-staleness": staleness,
            "staleness-policy": chance.choice(("refuse", "damp"))}


def choose(seed: int) -> dict:
    """Settings of one seed.  Those with a dash in their name, and aggregate, are options."""
    chance = random.Random(f"plan {seed}")
    large = seed % LARGE_IN == 0
    half = LARGE_HALF if large else MIDDLE_HALF if seed % 2 == 0 else SMALL_HALF
    # Neighbouring seeds begin with different rules, so that a few seeds have all of them.
    names = ["adam", "rmsprop", "lion", "sgd", "adagrad", "adamw"]
    names = names[seed % 6:] + names[:seed % 6]
    if seed % SWAPPED_IN == 1:
        names = [names[0], *chance.sample(names[1:], 2)]
    else:
        names = names[:1]
    return {"rules": [rule(chance, name, 2 * half) for name in names],
            "half": half, **steps(chance),
            "window": chance.randint(1, 8),
            "pause": 40_000 if large else 1000,  # us, at each client
            "fsync": chance.choice(("never", "interval", "always")),
            "journal": "recycle" if large else chance.choice(("recycle", "keep")),
            "checkpoint-interval-s": 0.1 if large else 0.3,
            "publish-interval-ms": 50 if large else chance.choice((0, 0, 20)),
            "lane": "inline" if seed // 4 % 2 == 0 else "auto",  # auto: shared memory
            "bf16": seed % 3,  # so many clients speak it on lane inline,
            "inline": 1 + seed // 3 % 3}  # and so many are on it whatever is offered


def option_words(settings: dict) -> list:
    names = ("aggregate", "aggregate-weights", "max-staleness", "staleness-policy", "fsync",
             "journal", "checkpoint-interval-s", "publish-interval-ms", "lane")
    kept = 1000 if settings["journal"] == "keep" else 2
    return [word for name in names for word in (f"--{name}", settings[name])] + [
        "--checkpoints-kept", kept]


def rule_words(words: list) -> list:
    return ["--optimizer", words[0]] + [each for word in words[1:] for each in ("--set", word)]


def text(settings: dict) -> str:
    rules = " | ".join(" ".join(words) for words in settings["rules"])
    return rules + "; " + ", ".join(f"{key} {each}" for key, each in settings.items()
                                    if key != "rules")
