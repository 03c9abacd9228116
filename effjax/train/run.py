"""Starting and resuming a run, for the commands and for Python."""

from pathlib import Path
from typing import Any

from .config import PATHS
from .processes import check_same_everywhere, is_first, run_on_first
from .run_directory import RunDirectory
from .task import Task
from .trackers import check_tracker


def open_run(task: Task[Any], path: Path, resume: bool, overwrite: bool) -> RunDirectory:
    """Create the directory of a run, or open it to resume. Each process calls this.

    Raises:
        TrainError: The directory cannot be used, or the processes have other options or data.
    """
    check_tracker(task.config.report_to)
    content = task.describe()

    def open_directory() -> None:
        if resume:
            RunDirectory.open(path)
        else:
            RunDirectory.create(path, content, overwrite)

    # Files may be at another path on each machine.
    check_same_everywhere("option", content["options"] | dict.fromkeys(PATHS))
    check_same_everywhere("data", content["data"])
    check_same_everywhere("checkpoint", content.get("base", {}))
    run_on_first(open_directory)
    run = RunDirectory.find(path)
    run.writes = is_first()
    return run
