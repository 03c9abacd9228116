"""What the tests of all commands share besides fixtures."""

import shlex
import signal

TINY = ["train", "densenet", "--depth", "10", "--growth-rate", "4"]


def one_line(err: str) -> bool:
    """Whether it is what `effjax` says of an error of the user's."""
    return err.startswith("effjax: ") and err.endswith("\n") and err.count("\n") == 1


def interrupt_at(number):
    """For a progress: Ctrl-C after a step."""
    return signal_at(signal.SIGINT, number)


def signal_at(which, number):
    """For a progress: a signal after a step."""

    def step(self, step, measured, rate):
        if step == number:
            signal.raise_signal(which)

    return step


def planned(monkeypatch, run, command):
    """Runs a command of `effjax memory` up to where it plans; returns what it would."""
    made = []

    def plan(steps, *, batch_size, num_devices, **_):
        made.append((batch_size, num_devices))
        return {}

    monkeypatch.setattr("effjax.cli.memory.plan_steps", plan)
    code, _, err = run(*shlex.split(command)[1:])
    assert (code, err) == (0, "")
    return made[0]
