"""How much what the daemon could know of a job narrows the prediction of its run time: generated labs, many seeds.

    python -m benchmarks.knowledge

Traces have neither command lines nor progress, so the jobs are generated. A lab has 12 users with 4 scripts each. Run
times multiply: of a user (log-normal, sigma 1), of a script (0.8), of its length setting (epochs: 1, 3, 10 or 30; in
three scripts of five an argument, in one a variable of the environment, in one a change of the script that leaves no
trace), and of the run itself (0.15, data and node). A user goes on with the same setting with probability 0.6. In half
of the scripts the job's name tells the setting. One run in ten ends after a hundredth of its time, as with a mistake,
and succeeds all the same. Runs go on at a speed that drifts by 10 % a tenth of the way.

Errors are factors: 1.5 is a prediction of two thirds or of three halves of the actual time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from random import Random
from statistics import quantiles

from gpusched.model.progress import Sample, left_s
from gpusched.predict.predictor import RunTimes, by_mean
from gpusched.predict.reports import ReportTrust
from gpusched.scheduler.timeline import foreseen_end

SEEDS, JOBS = 20, 1200
EPOCHS = (1, 3, 10, 30)
_STEPS = 10


@dataclass(frozen=True, slots=True)
class Script:
    """One program of a user."""

    user: int
    number: int
    scale_s: float
    told_by: str
    """What shows the length setting: argument, environment or nothing."""
    is_named: bool
    bar: str
    """What its bar counts: all of the run, or each of ten epochs."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One run."""

    script: Script
    setting: int
    run_s: float
    parts_s: tuple[float, ...]
    """Length of each tenth of its work."""

    def keys(self, *more: Hashable) -> tuple[Hashable, ...]:
        """Groups of similar jobs as in the daemon, after narrower ones."""
        family = self.script.user, self.script.number
        return (*((family, one) for one in more), family, self.script.user, ())


def lab(seed: int) -> Iterator[Generated]:
    """The runs of one lab, in the order of their ends."""
    dice = Random(seed)
    scripts, setting = [], {}
    for user in range(12):
        scale_s = 1200 * dice.lognormvariate(0, 1.0)
        for number in range(4):
            told_by = dice.choice(["argument"] * 3 + ["environment", "nothing"])
            own_s = scale_s * dice.lognormvariate(0, 0.8)
            one = Script(user, number, own_s, told_by, dice.random() < 0.5, dice.choice(["run", "epoch"]))
            scripts.append(one)
            setting[one] = dice.choice(EPOCHS)
    for _ in range(JOBS):
        script = dice.choice(scripts)
        if dice.random() > 0.6:
            setting[script] = dice.choice(EPOCHS)
        run_s = script.scale_s * setting[script] * dice.lognormvariate(0, 0.15) / (100 if dice.random() < 0.1 else 1)
        speeds = [1.0]
        while len(speeds) < _STEPS:
            speeds.append(speeds[-1] * dice.lognormvariate(0, 0.1))
        parts = [1 / speed for speed in speeds]
        yield Generated(script, setting[script], run_s, tuple(part * run_s / sum(parts) for part in parts))


def _command_line(one: Generated) -> Hashable:
    return one.setting if one.script.told_by == "argument" else None


def _with_environment(one: Generated) -> Hashable:
    return one.setting if one.script.told_by != "nothing" else None


def _name(one: Generated) -> Hashable:
    return one.setting if one.script.is_named else None


KNOWN: dict[str, Callable[[Generated], tuple[Hashable, ...]]] = {
    "nothing but all jobs": lambda one: ((),),
    "user": lambda one: one.keys()[-2:],
    "user and script": lambda one: one.keys(),
    "and the name": lambda one: one.keys(("name", _name(one))),
    "and the command line (as the daemon)": lambda one: one.keys(("line", _command_line(one))),
    "and the environment": lambda one: one.keys(("environment", _with_environment(one))),
    "the setting itself": lambda one: one.keys(("setting", one.setting)),
}
"""Keys of a run, narrowest first, by what is known of it at its submission."""


def at_submission(keys_of: Callable[[Generated], tuple[Hashable, ...]]) -> list[float]:
    """Errors of planned run times, as logarithms."""
    errors = []
    for seed in range(SEEDS):
        past = RunTimes()
        for one in lab(seed):
            keys = keys_of(one)
            guess = by_mean(past, keys, None)
            if guess is not None:
                errors.append(abs(log(max(1.0, guess.plan_s) / max(1.0, one.run_s))))
            past.learn(keys, one.run_s)
    return errors


def while_running(tenth: int, *, reports: str) -> list[float]:
    """Errors of the expected end of runs after so many tenths of their work, as logarithms of whole run times.

    Args: reports: what counts beside earlier runs, as `main` names it.
    """
    errors = []
    for seed in range(SEEDS):
        past, trust = RunTimes(), ReportTrust()
        for one in lab(seed):
            keys = one.keys()
            guess = by_mean(past, keys, None)
            now = sum(one.parts_s[:tenth])
            told_s = [_reported_s(one, step, is_bar=reports != "progress file") for step in range(1, tenth + 1)]
            told_at = told_s[-1] if reports != "nothing" else None
            if reports == "bars until they are wrong" and not trust.is_trusted(keys[0]):
                told_at = None
            end_at = foreseen_end(0.0, None if guess is None else float(guess.plan_s), inf, now, told_at)
            if guess is not None:
                errors.append(abs(log(max(1.0, end_at) / max(1.0, one.run_s))))
            past.learn(keys, one.run_s)
            trust.learn(keys[0], [_reported_s(one, step, is_bar=True) for step in range(1, _STEPS)], one.run_s)
    return errors


def _reported_s(one: Generated, step: int, *, is_bar: bool) -> float:
    """Run time by what a run says after so many tenths: the end of the next tenth where its bar counts epochs."""
    if is_bar and one.script.bar == "epoch":
        return sum(one.parts_s[: step + 1])
    samples = [Sample(sum(one.parts_s[:done]), done / _STEPS) for done in range(1, step + 1)]
    return samples[-1].elapsed_s + (left_s(samples, began_anew=False) or 0.0)


def _row(name: str, errors: Sequence[float]) -> str:
    tenths = quantiles(errors, n=10)
    return f"{name:42} {exp(tenths[4]):8.2f} {exp(tenths[8]):8.1f}"


def main() -> None:
    print(f"{SEEDS} labs of {JOBS} runs; errors as factors\n{'known at submission':42} {'median':>8} {'9 in 10':>8}")
    for name, keys_of in KNOWN.items():
        print(_row(name, at_submission(keys_of)))
    for tenth in (2, 5, 8):
        print(f"\nafter {tenth} tenths of the work")
        for name in ("nothing", "progress file", "every bar", "bars until they are wrong"):
            print(_row(name, while_running(tenth, reports=name)))


if __name__ == "__main__":
    main()
