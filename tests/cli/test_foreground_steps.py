"""srun at the terminal of a foreground job."""

from __future__ import annotations

from screen import Screen
from shell import Shell

PROMPT = "%%> "


def shell_at(sh: Shell) -> Screen:
    words = ("-c", "2", "--pty", "bash", "--norc", "--noprofile", "-i")
    return Screen(sh, "grun", *words, PS1=PROMPT, HISTFILE="")


def test_a_step_may_have_the_terminal(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        screen.press("srun --pty bash --norc --noprofile -i\r")
        screen.see(PROMPT)
        screen.press("echo step-$SLURM_STEP_ID-$((40+2)); test -t 0 && echo is-a-$((40+2))\r")
        screen.see("step-0-42\r\n")
        screen.see("is-a-42\r\n")
        screen.see(PROMPT)
        screen.press("sh -c 'echo ready-$((1+1)); exec sleep 600'\r")
        screen.see("ready-2\r\n")
        screen.press("\x03")
        screen.see(PROMPT)
        screen.press("echo still-$((40+2))\r")
        screen.see("still-42\r\n")
        screen.see(PROMPT)
        screen.press("exit 7\r")
        screen.see(PROMPT)
        screen.press("echo code-$?-$((40+2))\r")
        screen.see("code-7-42\r\n")
        screen.see(PROMPT)
        screen.press("exit\r")
        assert screen.end() == 0


def test_one_ctrl_c_asks_and_two_end_a_step(sh: Shell) -> None:
    with shell_at(sh) as screen:
        screen.see(PROMPT)
        screen.press("srun -n2 bash -c 'echo up-$SLURM_PROCID-$((40+2)); exec sleep 600'\r")
        for task in (0, 1):
            screen.seen = 0
            screen.see(f"up-{task}-42")
        screen.press("\x03")
        screen.see("srun: interrupt (one more within 1 sec to abort)")
        screen.see("tasks 0-1: running")
        screen.press("\x03")
        # On a loaded machine the second may come too late, and asks anew.
        while screen.see_any("srun: sending Ctrl-C to StepId=", "tasks 0-1: running") == "tasks 0-1: running":
            screen.press("\x03")
        screen.see(PROMPT)
        screen.press("echo code-$?-$((40+2))\r")
        screen.see("code-130-42\r\n")
        screen.see(PROMPT)
        screen.press("exit\r")
        screen.end()
