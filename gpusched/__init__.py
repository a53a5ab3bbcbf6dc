"""gpusched: a batch scheduler for shared GPU servers ("Slurm-lite").

    import gpusched

    with gpusched.Client() as client:
        job = client.wait(client.submit(["python", "train.py"], gpus=1, time="4h"))

Kept free of imports: the command-line clients import this package at every prompt. The names above are
loaded when they are first used.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.addons.executor.executor import CallFuture as CallFuture
    from gpusched.addons.executor.executor import Executor as Executor
    from gpusched.model.states import JobState as JobState
    from gpusched.sdk.async_client import AsyncClient as AsyncClient
    from gpusched.sdk.client import Client as Client
    from gpusched.sdk.values import Event as Event
    from gpusched.sdk.values import Gpu as Gpu
    from gpusched.sdk.values import JobDetails as JobDetails
    from gpusched.sdk.values import JobInfo as Job
    from gpusched.sdk.values import RunInfo as Run

_HOME_OF = {
    "AsyncClient": "gpusched.sdk.async_client",
    "Client": "gpusched.sdk.client",
    "Event": "gpusched.sdk.values",
    "Gpu": "gpusched.sdk.values",
    "Job": "gpusched.sdk.values:JobInfo",
    "JobDetails": "gpusched.sdk.values",
    "JobState": "gpusched.model.states",
    "Run": "gpusched.sdk.values:RunInfo",
}
_OF_EXECUTOR = ("CallFuture", "Executor")

__all__ = [
    "AsyncClient",
    "CallFuture",
    "Client",
    "Event",
    "Executor",
    "Gpu",
    "Job",
    "JobDetails",
    "JobState",
    "Run",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "load_ipython_extension":
        from gpusched.entry_points import need

        return need("ipython", "notebook", "%load_ext gpusched")
    if name in _OF_EXECUTOR:
        from gpusched.entry_points import need

        return need(f"python.{name}", "executor", f"gpusched.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gpusched' has no attribute {name!r}")
    from importlib import import_module

    module, _, own_name = _HOME_OF[name].partition(":")
    return getattr(import_module(module), own_name or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
