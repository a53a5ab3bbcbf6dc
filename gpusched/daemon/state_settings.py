"""The few settings, and what was learned from earlier runs, that the memory depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpusched.model.job import Job, Run
from gpusched.model.leaning import NodeLeaning
from gpusched.model.settings import EpilogSettings, Settings
from gpusched.model.snapshot import Reason
from gpusched.predict.family import Family, Invocation, family, invocation_of, stated_limit_s
from gpusched.predict.predictor import RunTimeGuess
from gpusched.scheduler.admission import why_infeasible


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What the memory depends on; other settings need another memory."""

    grace_s: float = 30.0
    """Default grace, for jobs that name none."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    guess: Callable[[Job], RunTimeGuess | None] | None = None
    """Run time of a job; None goes by its limit, or leaves it open."""
    is_known_invocation: Callable[[Invocation], bool] | None = None
    """Whether a job with this command line has completed; None: lengths are not predicted by it."""
    slowness: Callable[[Run], float] | None = None
    """How many times as long as at speed 1 a run takes on its GPUs; None: all are of speed 1."""
    lean: Callable[[Job], NodeLeaning | None] | None = None
    """What earlier runs say about nodes for a job; None: they are not asked."""
    cpus: tuple[float, ...] = ()
    """Cores of each node."""
    epilogs: EpilogSettings = field(default_factory=EpilogSettings)
    """Epilogs and how long they may take."""
    limits: Settings | None = field(default=None, compare=False)
    """Settings for jobs that wait although they ask for too much: see `why_infeasible`."""

    @classmethod
    def of(
        cls,
        settings: Settings,
        guess: Callable[[Job], RunTimeGuess | None] | None = None,
        cpus: tuple[float, ...] = (),
        lean: Callable[[Job], NodeLeaning | None] | None = None,
        slowness: Callable[[Run], float] | None = None,
        is_known_invocation: Callable[[Invocation], bool] | None = None,
    ) -> StateSettings:
        """Extract them from the settings; `guess` is used only if the settings ask for it."""
        tiers = {name: qos.tier for name, qos in settings.qos.items()}
        leans = settings.placement.by_history and len(cpus) > 1
        return cls(
            settings.life.grace_s,
            tiers,
            guess if settings.priority.predict else None,
            is_known_invocation if settings.priority.predict else None,
            slowness if settings.gpu.speed else None,
            lean if leans else None,
            cpus,
            settings.epilog,
            settings,
        )

    def longest_epilogs_s(self, job: Job) -> float:
        """Time limits of the epilogs after each run of this job together; 0 without any."""
        has_site = self.epilogs.path is not None and job.spec.adopted is None
        own_s = self.epilogs.job_timeout_s if job.spec.launch.epilog is not None else 0.0
        return own_s + (self.epilogs.timeout_s if has_site else 0.0)

    def why_infeasible(self, job: Job) -> Reason | None:
        """Why a job that was accepted nevertheless cannot start as things are; None for any other."""
        if not job.spec.waits_if_infeasible or self.limits is None:
            return None
        return why_infeasible(job.spec, self.cpus, self.limits)

    def guess_of(self, job: Job | None) -> RunTimeGuess | None:
        """Guessed run time of a job; None if its limit is used, or nothing is known."""
        return None if self.guess is None or job is None else self.guess(job)

    def learned(self, job: Job) -> tuple[int | None, int | None]:
        """Expected run time of a pending job, and the run time to plan with instead of its limit."""
        guess = self.guess_of(job)
        return (None, None) if guess is None else (guess.expected_s, guess.plan_s)

    def leaning(self, job: Job) -> NodeLeaning | None:
        """What earlier runs say about nodes for a pending job."""
        return None if self.lean is None else self.lean(job)

    def alike(self, job: Job) -> Family | None:
        """Family of jobs whose ends change the predictions of this one; None without predictions."""
        return None if self.guess is None and self.lean is None else family(job)

    def invocation(self, job: Job) -> Invocation | None:
        """Command line whose ends change the prediction of this job; None: its limit, or its family, decides."""
        is_by_invocation = self.is_known_invocation is not None and stated_limit_s(job) is None
        return invocation_of(job) if is_by_invocation else None

    def knows(self, invocation: Invocation | None) -> bool:
        """Whether jobs with this command line are predicted by its own runs."""
        return invocation is not None and self.is_known_invocation is not None and self.is_known_invocation(invocation)
