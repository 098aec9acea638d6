"""``pleach.SVC`` beside ``sklearn.svm.SVC``, which is LIBSVM."""

import warnings

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn", minversion="1.6", reason="scikit-learn is not installed")

from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC as Libsvm
from sklearn.utils.estimator_checks import parametrize_with_checks

import pleach


def breast_cancer():
    X, y = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(X), y


def digits():
    X, y = load_digits(return_X_y=True)
    return X / 16, (y % 2 == 0).astype(int)


def objective(machine, X):
    """Of two classes, from what an estimator shows."""
    coefficients = machine.dual_coef_[0]
    vectors = X[machine.support_]
    norms = (vectors * vectors).sum(axis=1)
    gram = np.exp(-machine._gamma * (norms[:, None] + norms - 2 * vectors @ vectors.T))
    return 0.5 * coefficients @ gram @ coefficients - np.abs(coefficients).sum()


@parametrize_with_checks([pleach.SVC()])
def test_estimator_has_the_habits_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("shrink", ["none", "2:multi", "5%:single"])
@pytest.mark.parametrize(
    ("data", "C", "gamma", "support", "bounded", "golden"),
    [
        (breast_cancer, 1, 1 / 30, 119, 62, -59.76134537),
        (digits, 1, 0.1, 399, 272, -210.14106869),
    ],
)
def test_solution_is_that_of_libsvm(data, C, gamma, support, bounded, golden, shrink):
    X, y = data()
    settings = {"C": C, "gamma": gamma, "tol": 1e-6}
    own, other = pleach.SVC(shrink=shrink, **settings).fit(X, y), Libsvm(**settings).fit(X, y)
    assert list(own.support_) == list(other.support_) and len(own.support_) == support
    assert list(own.n_support_) == list(other.n_support_)
    assert (np.abs(own.dual_coef_) >= C).sum() == bounded
    assert own.objective_ == pytest.approx(objective(other, X), rel=1e-6)
    assert own.objective_ == pytest.approx(golden, rel=1e-6)
    assert own.intercept_ == pytest.approx(other.intercept_, abs=1e-5)
    assert np.array_equal(own.predict(X), other.predict(X))
    assert own.decision_function(X) == pytest.approx(other.decision_function(X), abs=1e-4)


@pytest.mark.parametrize("kernel", ["linear", "poly", "rbf", "sigmoid"])
def test_several_classes_and_every_kernel_predict_as_libsvm(kernel):
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    settings = {"kernel": kernel, "gamma": 0.05, "coef0": 0.1, "tol": 1e-6}
    own, other = pleach.SVC(**settings).fit(X, names), Libsvm(**settings).fit(X, names)
    assert np.array_equal(own.predict(X), other.predict(X))
    assert list(own.classes_) == list(other.classes_)
    assert own.intercept_ == pytest.approx(other.intercept_, abs=1e-3)


def test_ranks_train_one_machine(ranks):
    program = """
        import numpy as np, pleach
        from sklearn.datasets import load_iris
        X, y = load_iris(return_X_y=True)
        with pleach.join() as group:
            own = slice(group.rank, None, group.world_size)
            machine = pleach.SVC(group=group).fit(X[own], y[own])
            print(machine.intercept_.tobytes().hex(), (machine.predict(X) == y).mean() > 0.95)
    """
    job = ranks(2, program)
    results = [job.finish(rank, timeout=120) for rank in range(2)]
    assert all(status == 0 for status, _, _ in results), results
    assert results[0][1] == results[1][1] and results[0][1].endswith("True\n")


@pytest.mark.parametrize(
    ("change", "own", "others"),
    [
        ("X[3, 1] = 1e39", "beyond the range of float32", "another rank of the group refuses"),
        ("X[3, 1] = np.nan", "contains NaN", "another rank of the group refuses"),
        ("y = y * 2**40", "not whole numbers", "another rank of the group refuses"),
        ("X = np.hstack([X, X])", "have 8 features here, and 4 to 8", "have 4 features here, and 4 to 8"),
    ],
)
def test_samples_that_one_rank_refuses_end_all_ranks_at_once(ranks, change, own, others):
    program = f"""
        import time, numpy as np, pleach
        from sklearn.datasets import load_iris
        X, y = load_iris(return_X_y=True)
        with pleach.join() as group:
            if group.rank == 1:
                {change}
            began = time.monotonic()
            try:
                pleach.SVC(group=group, gamma=0.1).fit(X, y)
            except ValueError as error:
                print(time.monotonic() - began < 20, error)
    """
    job = ranks(2, program)
    results = [job.finish(rank, timeout=120) for rank in range(2)]
    assert all(status == 0 for status, _, _ in results), results
    assert results[1][1].startswith("True ") and own in results[1][1]
    assert results[0][1].startswith("True ") and others in results[0][1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"C": 0}, "C is 0"),
        ({"gamma": -1.0}, "gamma is -1"),
        ({"kernel": "cosine"}, "there are linear, poly, rbf, sigmoid"),
        ({"shrink": "sometimes"}, "give none, N or P%"),
        ({"selection": "third"}, "'first' and 'second'"),
    ],
)
def test_bad_parameters_are_named(settings, text):
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match=text):
        pleach.SVC(**settings).fit(X, y)


def test_kernel_that_is_not_positive_is_warned_of():
    X, y = load_iris(return_X_y=True)
    with pytest.warns(UserWarning, match="the kernel is not positive along [1-9]"):
        pleach.SVC(kernel="sigmoid", gamma=0.05, coef0=0.1).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pleach.SVC(gamma=0.5).fit(X, y)
        # In 32 bits these values give a pair of which the curvature is -1.
        pleach.SVC(kernel="linear").fit([[3000.25], [3000.25048828125]], [0, 1])
