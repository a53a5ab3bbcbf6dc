"""`gpusched.Executor`: calls of Python functions as jobs, with futures as of `concurrent.futures`.

    folder     the folder of an executor: calls, results and what the jobs run before them
    executor   submits, collects and cancels

A job runs `sdk/call`, whose path stays: pending jobs name it.
"""

ENTRY_POINTS = {
    "python.Executor": "gpusched.addons.executor.executor:Executor",
    "python.CallFuture": "gpusched.addons.executor.executor:CallFuture",
}
