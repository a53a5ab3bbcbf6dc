"""A lab to which things happen by the roll of dice, with errors at any place."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.failures import STEPS
from gpusched.model.commands import (
    Cancel,
    Drain,
    Hold,
    PauseQueue,
    Release,
    Requeue,
    Resume,
    Selection,
    Submit,
    Suspend,
    Update,
)
from gpusched.model.job import Alerting, ArraySpec, RetryRule
from gpusched.model.queue_settings import QosSettings
from gpusched.model.settings import AlertSettings
from gpusched.model.tasks import parse_tasks
from gpusched.ports import Changes
from gpusched.testing import request

MISHAPS = ("", "", "", "", "full", "lost commit", "made commit", *STEPS)


class LabStory:
    """A lab to which things happen by the roll of dice, with errors at any place."""

    mishaps = MISHAPS

    def __init__(self, dice: Random, patch: pytest.MonkeyPatch) -> None:
        self.dice, self.patch = dice, patch
        self.lab = self.make_lab()
        self.last = 0
        self.names: dict[int, str] = {}
        """Tasks of arrays, as dependencies name them."""
        self.arrays: list[int] = []
        self.has_singletons = dice.random() < 0.3
        """Then all are equally urgent: a singleton passes that to the first job that it waits for, not to the next."""

    def make_lab(self) -> Lab:
        return Lab(
            gpus=2,
            cpus=4,
            outcome=SimulatedOutcome(runs_s=3),
            alert=AlertSettings(outbox=5),
            qos={name: QosSettings(name, tier=tier) for tier, name in enumerate(("normal", "high"))},
        )

    def check(self) -> None:
        """What holds between two ticks; raises AssertionError."""

    def some_id(self) -> int:
        return self.dice.randint(1, max(1, self.last))

    def some_job(self) -> str:
        job_id = self.some_id()
        return self.names.get(job_id, str(job_id))

    def submission(self) -> Any:
        dice, lab = self.dice, self.lab
        parts: dict[str, Any] = {"request": request(gpus=dice.choice([0, 0, 1, 2]), cpus=dice.choice([1, 2]))}
        if dice.random() < 0.5:
            kinds = ["afterok", "afterany", "afternotok", "after", "aftercorr"]
            kind = dice.choice([*kinds, "singleton"] if self.has_singletons else kinds)
            parts["dependency"] = kind if kind == "singleton" else f"{kind}:{self.some_job()}"
            if kind == "aftercorr" and self.arrays and dice.random() < 0.7:
                # Only then does one task wait for another.
                parts["dependency"] = f"{kind}:{dice.choice(self.arrays)}"
                parts["array"] = ArraySpec("0-4", dice.choice([None, 1]))
        if "array" not in parts and dice.random() < 0.3:
            parts["array"] = ArraySpec(
                dice.choice(["0-2", "1,4", "0-4"]), dice.choice([None, 2]), dice.choice([None, 0])
            )
        if dice.random() < 0.3:
            parts["alerting"] = Alerting(tuple(sorted(dice.sample(["begin", "end", "fail", "queue_empty"], 2))))
        if dice.random() < 0.2:
            parts["hold"] = True
        if dice.random() < 0.2:
            parts["begin_at"] = lab.clock.now() + dice.choice([1, 5])
        if dice.random() < 0.2:
            parts["deadline_at"] = lab.clock.now() + dice.choice([2, 8])
            parts["time_limit_s"] = 3
        parts["name"] = dice.choice(["x", "y"])
        if not self.has_singletons:
            parts["qos"] = dice.choice(["normal", "high"])
            parts["nice"] = dice.choice([0, 10])
        parts["retry"] = RetryRule(retries=dice.choice([0, 1]), backoff_s=2.0)
        return lab.submission(dice.choice([ANN, BOB]), **parts)

    def command(self) -> Any:
        dice = self.dice
        kind, ids = dice.randrange(13), (self.some_id(),)
        if kind <= 5:
            return self.submission()
        if kind == 6:
            return Cancel(ROOT, Selection(ids=ids))
        if kind == 7:
            return dice.choice([Hold, Release])(ROOT, ids)
        if kind == 8:
            return dice.choice([Suspend, Resume, Requeue])(ROOT, ids)
        if kind == 9:
            changes = [{"dependency": f"afterany:{self.some_job()}"}, {"dependency": None}]
            changes += [] if self.has_singletons else [{"nice": 5}, {"qos": "high"}]
            return Update(ROOT, ids, dice.choice(changes))
        if kind == 10:
            return Drain(ROOT, (dice.choice(["0", "1", "n1"]),), dice.choice(["dust", None]))
        if kind == 11:
            return PauseQueue(ROOT, "default", is_resumed=dice.random() < 0.7)
        return Update(ROOT, ids, dice.choice([{"name": "x"}, {"time_limit_s": 4}, {"throttle": 1}]))

    def submit(self, command: Any) -> None:
        def hear(answer: Any) -> None:
            if not isinstance(command, Submit) or not isinstance(answer, dict):
                return
            (job_id,) = answer["ids"]
            self.last = max(self.last, job_id)
            array = command.specs[0].array
            if array is not None:
                self.arrays.append(job_id)
            for number, task in enumerate(parse_tasks(array.tasks) if array is not None else (), 1):
                self.names[job_id + number] = f"{job_id}_{task}={job_id + number}"
                self.last = job_id + number

        self.lab.ticker.submit(command, hear)

    def tick(self) -> None:
        dice, lab = self.dice, self.lab
        for _ in range(dice.choice([0, 1, 1, 3])):
            self.submit(self.command())
        lab.clock.advance(dice.choice([0.0, 0.5, 1.0, 3.0]))
        lab.outcome = SimulatedOutcome(
            runs_s=dice.choice([1, 4]), exit_code=dice.choice([0, 0, 1]), stop_takes_s=dice.choice([1, 1, 6])
        )
        lab.used[0] = dice.choice([0, 0, 9000])
        mishap = dice.choice(self.mishaps)
        usual = lab.store.commit
        with self.patch.context() as patch:
            lab.store.is_full = mishap == "full"
            if mishap.endswith("commit"):

                def commit(changes: Changes) -> None:
                    if mishap == "made commit":
                        usual(changes)
                    raise RuntimeError(mishap)

                patch.setattr(lab.store, "commit", commit)
            patch.setattr(lab.ticker, "_step", self.raising(mishap))
            lab.read()
            with suppress(RuntimeError):
                lab.ticker.tick()
        lab.store.is_full = False
        self.check()

    @staticmethod
    def raising(mishap: str) -> Any:
        def step(name: str) -> None:
            if name == mishap:
                raise RuntimeError(mishap)

        return step

    def play(self, turns: int) -> None:
        for _ in range(turns):
            self.tick()
