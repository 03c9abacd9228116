import pytest

from tests.train.text.small import write_base


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Return the folder of a checkpoint with rows, which tests do not change."""
    pytest.importorskip("tokenizers")
    return write_base(tmp_path_factory.mktemp("base"))
