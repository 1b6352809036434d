import pytest
from tiny_folder import Source


@pytest.fixture
def source(tmp_path, tiny):
    def make(name="source", config=tiny, **kwargs) -> Source:
        return Source(tmp_path / name, config, **kwargs)

    return make
