"""The matrix library for few rows: the faster one is used, and the choice is undone."""

import pytest
import torch

from swiftsure.run.graphs import blas


@pytest.fixture
def libraries(monkeypatch):
    """Libraries that take a given time; None: PyTorch was built without it."""
    blas._faster.cache_clear()
    took, now, tried = {}, ["cublas"], []

    def prefer(name=None):
        if name is not None:
            if took.get(name, 0) is None:
                raise RuntimeError(name)
            now[0] = name
        return now[0]

    def seconds(sizes, rows, dtype, device):
        tried.append((now[0], sizes, rows))
        return took[now[0]]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(blas, "_seconds", seconds)
    yield took, now, tried
    blas._faster.cache_clear()


@pytest.mark.parametrize(
    ("cublas", "cublaslt", "wanted"),
    [(2.0, 1.0, "cublaslt"), (1.0, 2.0, "cublas"), (2.0, None, "cublas")],
)
def test_the_faster_library_is_used(cublas, cublaslt, wanted, libraries):
    took, now, tried = libraries
    took |= {"cublas": cublas, "cublaslt": cublaslt}
    weights = [torch.zeros(3, 2), torch.zeros(4, 3)]
    for _ in range(2):  # timed once
        with blas.faster_blas(weights, 8):
            assert now == [wanted]
        assert now == ["cublas"]
    assert len(tried) == (1 if cublaslt is None else 2)
    assert tried[0] == ("cublas", ((3, 2), (4, 3)), 8)


def test_the_choice_is_undone_after_an_error(libraries):
    took, now, _ = libraries
    took |= {"cublas": 2.0, "cublaslt": 1.0}
    with pytest.raises(KeyError), blas.faster_blas([torch.zeros(3, 2)], 1):
        raise KeyError
    assert now == ["cublas"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_are_timed_on_a_gpu():
    before = torch.backends.cuda.preferred_blas_library()
    weight = torch.randn(224, 224, device="cuda")
    with blas.faster_blas([weight], 8):
        assert torch.linalg.norm(torch.ones(8, 224, device="cuda") @ weight) > 0
    assert torch.backends.cuda.preferred_blas_library() == before
