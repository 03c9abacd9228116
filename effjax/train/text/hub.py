"""Folders of repositories of the Hugging Face Hub, by name."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..._extras import install_command
from ..errors import DataError, quoted

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
# A repository may have any of them in its name, but a path that is missing is more likely.
SUFFIXES = {
    ".arrow", ".csv", ".gz", ".json", ".jsonl", ".parquet", ".safetensors", ".tsv", ".txt", ".zip",
}  # fmt: skip


class Repository(NamedTuple):
    """The name of a repository, such as `Qwen/Qwen3-8B` or `Qwen/Qwen3-8B@main`.

    Attributes:
        name: The owner and the name.
        revision: A branch, a tag or a commit; None for the default branch.
    """

    name: str
    revision: str | None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse_name(text: str) -> Repository | None:
    """Return the repository that a text names; None for a path, or a text of another form."""
    match = NAME.fullmatch(text)
    return None if match is None or names_file(text) else Repository(match[1], match[2])


def names_file(text: str) -> bool:
    """Return whether a text is a path: one that exists, or has the suffix of a file."""
    return Path(text).exists() or Path(text).suffix.lower() in SUFFIXES


def download(
    repository: Repository,
    patterns: Sequence[str],
    kind: Literal["model", "dataset"] = "model",
) -> tuple[Path, Repository]:
    """Download files of a repository into the cache of `huggingface_hub`.

    Its environment variables apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. A file that is
    in the cache is not downloaded again.

    Args:
        repository: The repository.
        patterns: Patterns of the names of the files.
        kind: What the repository holds.

    Returns:
        The folder of the files in the cache, and the repository with its commit as the revision.

    Raises:
        DataError: They cannot be downloaded, and are not in the cache.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
        from huggingface_hub.utils import disable_progress_bars
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is missing. Run {install_command('finetune')}.") from error

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            repository.name, revision=repository.revision, repo_type=kind,
            allow_patterns=[*patterns],
        )  # fmt: skip
    # The HTTP client raises other types as well, which differ between versions of the package.
    except Exception as error:
        access = "log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            problem = f"is gated on the Hub. Accept its terms there, and {access}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            problem = f"not found: neither a path nor a public {kind} on the Hub. Or {access}"
        elif isinstance(error, errors.RevisionNotFoundError):
            problem = "the Hub has no such revision. Give a branch, a tag or a commit after the @"
        elif isinstance(error, errors.LocalEntryNotFoundError):
            problem = (
                f"not found: neither a path nor a {kind} in the cache of the Hub, and the Hub "
                f"cannot be reached ({_reason(error)}). Give the folder of a copy, or run `hf "
                f"download {repository.name}` first"
            )
        else:
            problem = f"cannot be downloaded ({quoted(error)}). Try again, or give a folder"
        raise DataError(f"{repository}: {problem}.") from error
    return Path(folder), Repository(repository.name, Path(folder).name)


def _reason(error: Exception) -> str:
    cause = error.__cause__
    if cause is None or type(cause).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    return quoted(str(cause) or type(cause).__name__)
