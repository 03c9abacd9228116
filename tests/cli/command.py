"""Helpers of the tests of the commands."""

import shlex
import signal

TINY = ["train", "densenet", "--depth", "10", "--growth-rate", "4"]


def one_line(err: str) -> bool:
    """Return True for the one line of an error of the user."""
    return err.startswith("effjax: ") and err.endswith("\n") and err.count("\n") == 1


def interrupt_at(number):
    """Return a progress callback that presses Ctrl-C after a step."""
    return signal_at(signal.SIGINT, number)


def signal_at(which, number):
    """Return a progress callback that raises a signal after a step."""

    def step(self, step, measured, rate):
        if step == number:
            signal.raise_signal(which)

    return step


def planned(monkeypatch, run, command):
    """Run `effjax memory` up to the plan; return the batch size and the number of devices."""
    made = []

    def plan(steps, only, batch_size, max_batch, multiple_of, num_devices, **_):
        made.append((batch_size, num_devices))
        return {}

    monkeypatch.setattr("effjax.cli.memory.plan_steps", plan)
    code, _, err = run(*shlex.split(command)[1:])
    assert (code, err) == (0, "")
    return made[0]
