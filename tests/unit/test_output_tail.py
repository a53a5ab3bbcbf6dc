"""What the end of a run's output says about its failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.engine.supervisor.output_tail import GPU_OOM, LONGEST_CAUSE, TAIL_BYTES, find_cause, read_tail, shows_oom

HEAD = "Traceback (most recent call last):\n"
IN_F = HEAD + '  File "a.py", line 1, in f\n'
PLAIN = """epoch 3
Traceback (most recent call last):
  File "/home/alice/train.py", line 90, in <module>
    main()
  File "/home/alice/train.py", line 41, in main
    frame["x"]
  File "/home/alice/.venv/lib/python3.11/site-packages/pandas/frame.py", line 3896, in __getitem__
    raise KeyError(key)
KeyError: 'x'
"""
RANKS = """[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/alice/ddp.py", line 7, in step
[rank0]:   File "/home/alice/ddp.py", line 9, in reduce
[rank1]:     raise ValueError("bad batch")
[rank1]: ValueError: bad batch
[rank0]:     dist.all_reduce(loss)
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2027, remote process exited
Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
ddp.py FAILED
"""
WORKER = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    for batch in loader:
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/torch/utils/data/_utils/worker.py", line 308, in _worker_loop
    data = fetcher.fetch(index)
  File "data.py", line 5, in __getitem__
    return self.read(index)
ValueError: truncated image 17.png
"""
CHAINED = """Traceback (most recent call last):
  File "a.py", line 2, in load
    open(path)
FileNotFoundError: [Errno 2] No such file or directory: 'w.pt'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 4, in load
    raise RuntimeError("no weights") from None
RuntimeError: no weights
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "g.py", line 3, in <module>
  |     raise ExceptionGroup("two", [ValueError(1)])
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        pytest.param(PLAIN, "KeyError: 'x' (train.py:41 in main)", id="the user's own frame, not the library's"),
        pytest.param(RANKS, "ValueError: bad batch (ddp.py:7 in step)", id="no consequence and no wrapper"),
        pytest.param(WORKER, "ValueError: truncated image 17.png (data.py:5 in __getitem__)", id="worker"),
        pytest.param(CHAINED, "RuntimeError: no weights (a.py:4 in load)", id="chained"),
        pytest.param(GROUP, "ValueError: 1", id="group"),
        (HEAD + '  File "a.py", line 1\n' "    x = = 1\nSyntaxError: bad\n", "SyntaxError: bad (a.py:1)"),
        (IN_F + "KeyboardInterrupt\n", "KeyboardInterrupt (a.py:1 in f)"),
        ("Traceback (most recent call last):\nValueError: no frames\n", "ValueError: no frames"),
        (IN_F, None),
        pytest.param(PLAIN.replace("\n", "\r\n"), "KeyError: 'x' (train.py:41 in main)", id="of Windows"),
        ("\x1b[31m" + IN_F + "E: \x1b[1mred\x1b[0m\n", "E: red (a.py:1 in f)"),
        ("10%|#|\r" + IN_F + "E: x\n", "E: x (a.py:1 in f)"),
        ("run.sh: line 3: trian: command not found\n", "run.sh: line 3: trian: command not found"),
        ("usage: t.py\nt.py: error: argument --lr is required\ndone\n", "t.py: error: argument --lr is required"),
        (
            "lab1:7:9 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed\nexiting\n",
            "lab1:7:9 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed",
        ),
        ("CUDA error: device-side assert triggered\n", "CUDA error: device-side assert triggered"),
        ("terminate called after throwing\n  what():  std::bad_alloc\n", "what(): std::bad_alloc"),
        ("thread 'main' panicked at src/main.rs:4:5:\n", "thread 'main' panicked at src/main.rs:4:5"),
        ("run.sh: line 9:  4711 Segmentation fault      (core dumped) ./a.out\n",
         "run.sh: line 9: 4711 Segmentation fault (core dumped) ./a.out"),
        ("epoch 1 loss 2.3\nepoch 2 loss 2.1\n", None),
        ("an error: long ago\n" + "epoch\n" * 40, None),
        ("", None),
    ],
)  # fmt: skip
def test_the_cause_of_a_failure_is_one_line(output: str, cause: str | None) -> None:
    assert find_cause([output.encode()]) == cause


def test_a_traceback_counts_more_than_an_error_of_another_file() -> None:
    assert find_cause([PLAIN.encode(), b"error: of the shell\n"]) == "KeyError: 'x' (train.py:41 in main)"


def test_a_wrapper_alone_is_better_than_nothing() -> None:
    alone = RANKS[RANKS.index('Traceback (most recent call last):\n  File "/opt') :]
    assert find_cause([alone.encode()]) == (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError (torchrun:8)"
    )


def test_a_long_message_keeps_its_place() -> None:
    long = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\nE: {"x" * 9000}\n'
    cause = find_cause([long.encode()])
    assert cause is not None
    assert len(cause) == LONGEST_CAUSE
    assert cause.endswith("x... (a.py:1 in f)")


_words = st.sampled_from(
    [HEAD, '  File "', '", line ', ", in ", "\n", "\r", "\x1b[", "error:", "E: x", "\u202e", "é", " "]
)


@given(st.lists(st.one_of(_words.map(str.encode), st.binary(max_size=20)), max_size=60).map(b"".join))
def test_whatever_a_program_writes_the_cause_is_short_and_printable(tail: bytes) -> None:
    cause = find_cause([tail])
    assert cause is None or (len(cause) <= LONGEST_CAUSE and cause.isprintable())


@pytest.mark.parametrize("words", GPU_OOM)
def test_every_known_message_is_found_at_the_end_of_a_long_log(tmp_path: Path, words: bytes) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + words + b"\n" + b"y" * 1000)
    with open(log, "ab") as file:
        assert shows_oom(read_tail(file.fileno(), 0))
        assert not shows_oom(read_tail(file.fileno(), log.stat().st_size - 900))


def test_an_old_message_or_a_missing_file_is_not_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(GPU_OOM[0] + b"x" * TAIL_BYTES)
    with open(log, "ab") as file:
        assert not shows_oom(read_tail(file.fileno(), 0))
    with open("/dev/null", "wb") as null:
        assert not read_tail(null.fileno(), 0)
