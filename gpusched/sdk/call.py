"""The program of an executor's job: `python call.py FOLDER NUMBER` makes one call and writes its result.

Run by path with the caller's interpreter, so it imports nothing of gpusched: the caller's import path is known only
once the call has been read.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import Any

is_loading_main = False
"""Whether the caller's main module is being imported; each job would repeat any submission made then."""

if __name__ == "__main__":
    # Nothing may be imported from the folder of this file.
    del sys.path[0]


def main(folder: str, number: str) -> int:
    """Make the call; returns the exit code, 1 if the call raised: the job then counts as failed and may be retried."""
    with open(os.path.join(folder, f"{number}.call"), "rb") as file:
        setup = pickle.load(file)
        payload = file.read()
    sys.path[:] = setup["path"]
    document: dict[str, Any]
    is_ready = False
    try:
        try:
            with open(os.path.join(folder, "initializer"), "rb") as file:
                first = file.read()
        except FileNotFoundError:
            first = b""
        if b"__main__" in payload or b"__main__" in first:
            _load_main(setup)
        if first:
            initializer, arguments = pickle.loads(first)
            initializer(*arguments)
        is_ready = True
        call, arguments, keywords = pickle.loads(payload)
        # Without keywords it is a chunk of map: several calls in sequence.
        result = call(*arguments, **keywords) if keywords is not None else [call(*each) for each in arguments]
        document = {"ok": True, "value": pickle.dumps(result, setup["protocol"])}
    except BaseException as error:
        document = {"ok": False, "value": _packed(error, setup["protocol"]), "text": _text_of(error)}
        document["is_initializer"] = not is_ready and bool(first)
        sys.stderr.write(document["text"])
    document["run"] = os.environ.get("GPUSCHED_RUN", "")
    path = os.path.join(folder, f"{number}.result")
    # Atomic, even if this process is killed.
    with open(path + ".new", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        pickle.dump(document, file)
    os.replace(path + ".new", path)
    return 0 if document["ok"] else 1


def _text_of(error: BaseException) -> str:
    """The traceback from the first frame on that is not of this folder."""
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    trace = error.__traceback__
    while trace is not None and os.path.abspath(trace.tb_frame.f_code.co_filename).startswith(here):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _packed(error: BaseException, protocol: int) -> bytes | str:
    """The pickled exception, or its message if it cannot be pickled."""
    try:
        packed = pickle.dumps(error, protocol)
        pickle.loads(packed)
    except Exception:
        return "".join(traceback.format_exception_only(type(error), error)).strip().removeprefix("__mp_main__.")
    return packed


def _load_main(setup: dict[str, Any]) -> None:
    """Provide the caller's main module, imported under a name other than __main__, as in multiprocessing."""
    import runpy
    import types

    global is_loading_main
    is_loading_main = True
    module = types.ModuleType("__mp_main__")
    if setup["main_name"] is not None:
        found = runpy.run_module(setup["main_name"], run_name="__mp_main__", alter_sys=True)
    elif setup["main_path"] is not None:
        found = runpy.run_path(setup["main_path"], run_name="__mp_main__")
    else:
        is_loading_main = False
        return
    is_loading_main = False
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
