"""``pleach.SVC``: a support vector machine with the habits of scikit-learn."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils.multiclass import _ovr_decision_function, check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("pleach.SVC needs scikit-learn 1.6 or later; install scikit-learn") from error

from pleach import _native
from pleach._errors import ArgumentError


class SVC(ClassifierMixin, BaseEstimator):
    """C-support vector classification, trained by the ranks of a group.

    The parameters that ``sklearn.svm.SVC`` has too mean the same there. The others:

    shrink: when samples are left out of the iterations: ``"none"``, ``"N"`` iterations or
    ``"P%"`` of the samples, then ``":single"`` or ``":multi"`` for when they come back.
    selection: ``"second"`` as LIBSVM, or ``"first"``.
    group: a ``pleach.Group``; each rank calls ``fit`` with its own samples, and all get the same
    machine. Then labels are whole numbers. Without a group this process trains alone.
    """

    def __init__(
        self,
        *,
        C: float = 1.0,
        kernel: str = "rbf",
        degree: int = 3,
        gamma: float | str = "scale",
        coef0: float = 0.0,
        tol: float = 1e-3,
        cache_size: float = 200,
        max_iter: int = -1,
        shrink: str = "5%:single",
        selection: str = "second",
        group: Any = None,
    ) -> None:
        self.C = C
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.tol = tol
        self.cache_size = cache_size
        self.max_iter = max_iter
        self.shrink = shrink
        self.selection = selection
        self.group = group

    def fit(self, X: Any, y: Any) -> SVC:
        """Trains the machine on samples ``X`` with labels ``y``."""
        if self.selection not in ("first", "second"):
            raise ValueError(f"selection is {self.selection!r}; there are 'first' and 'second'")
        if self.group is None:
            X, y = self._checked(X, y)
            classes, labels = np.unique(y, return_inverse=True)
            if len(classes) < 2:
                raise ValueError(f"all samples have one class, {classes[0]!r}; give at least two classes")
        else:
            X, labels = self._agreed(X, y)
        self._gamma = self._number_of_gamma(X)
        self._model = _native.svm_train(
            self.group,
            _bytes(X),
            X.shape[1],
            np.asarray(labels, np.int32).tolist(),
            kernel_name=self.kernel,
            degree=self.degree,
            gamma=self._gamma,
            coef0=float(self.coef0),
            c=float(self.C),
            tolerance=float(self.tol),
            shrink=self.shrink,
            first_order=self.selection == "first",
            cache_bytes=int(self.cache_size * 2**20),
            iterations_max=None if self.max_iter < 0 else self.max_iter,
        )
        # Of two classes the model has the larger one first.
        order = self._model.labels()
        self._labels_are_classes = self.group is not None
        self.classes_ = np.array(sorted(order)) if self._labels_are_classes else classes
        sign = -1 if len(order) == 2 else 1
        self.n_support_ = np.array(self._model.class_counts()[::sign], np.int32)
        by_class = np.split(np.arange(sum(self.n_support_)), np.cumsum(self._model.class_counts())[:-1])
        rows = np.concatenate(by_class[::sign])
        vectors = np.frombuffer(self._model.vectors(), np.float32).reshape(-1, X.shape[1])
        self.support_ = np.array(self._model.support(), np.int32)[rows]
        self.support_vectors_ = vectors[rows].astype(np.float64)
        self.dual_coef_ = np.array(self._model.coefficients())[rows].T
        self.intercept_ = np.array(self._model.intercepts())
        iterations, self.objective_, converged, negative_curvatures = self._model.training()
        self.n_iter_ = iterations
        if negative_curvatures:
            warnings.warn(
                f"the kernel is not positive along {negative_curvatures} of {iterations} steps, so the solution "
                "is one of several; give another kernel, or other gamma and coef0",
                UserWarning,
                stacklevel=2,
            )
        if not converged:
            warnings.warn(
                f"not converged after {iterations} iterations; scale the features or raise max_iter",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        return X, y

    def _agreed(self, X: Any, y: Any) -> tuple[Any, Any]:
        """The samples of this rank and their labels, if no rank refuses its own: all ranks end then."""
        refusal = None
        try:
            X, y = self._checked(X, y)
            if not np.array_equal(y, np.asarray(y, np.int32)):
                raise ArgumentError("labels of a group's ranks are not whole numbers of 32 bits")
            if not np.isfinite(np.frombuffer(_bytes(X), np.float32)).all():
                raise ArgumentError("samples of a group's ranks are beyond the range of float32")
        except (TypeError, ValueError) as error:
            refusal = error
        features = 0 if refusal else X.shape[1]
        told = np.array([refusal is not None, features, -features], np.int64)
        self.group.all_reduce(told, op="max")
        if refusal:
            raise refusal
        if told[0]:
            raise ArgumentError("another rank of the group refuses its samples; see its own error")
        if told[1] != -told[2]:
            raise ArgumentError(
                f"samples have {features} features here, and {-told[2]} to {told[1]} on the ranks of the group"
            )
        return X, y

    def _number_of_gamma(self, X: Any) -> float:
        if self.gamma == "auto":
            return 1.0 / int(X.shape[1])
        if self.gamma != "scale":
            return float(self.gamma)
        sums = np.array([X.size, X.sum(), (X * X).sum()])
        if self.group is not None:
            self.group.all_reduce(sums)
            variance = sums[2] / sums[0] - (sums[1] / sums[0]) ** 2
        else:
            variance = X.var()
        return float(1.0 / (X.shape[1] * variance)) if variance > 0 else 1.0

    def _samples(self, X: Any) -> bytes:
        return _bytes(validate_data(self, X, dtype=np.float64, reset=False))

    def decision_function(self, X: Any) -> Any:
        """Of two classes the distance from the border; of more a value for each class."""
        check_is_fitted(self)
        pairs = len(self.intercept_)
        decisions = np.frombuffer(self._model.decisions(self._samples(X))).reshape(-1, pairs)
        if pairs == 1:
            return decisions[:, 0].copy()
        return _ovr_decision_function(decisions < 0, -decisions, len(self.classes_))

    def predict(self, X: Any) -> Any:
        """The class of each sample."""
        check_is_fitted(self)
        labels = np.array(self._model.predict(self._samples(X)), np.int32)
        return labels if self._labels_are_classes else self.classes_[labels]

    def __getstate__(self) -> Any:
        state = dict(super().__getstate__())
        # A group belongs to its process.
        state["group"] = None
        if "_model" in state:
            state["_model"] = self._model.text()
        return state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if "_model" in state:
            self._model = _native.svm_model(state["_model"], self.n_features_in_)


def _bytes(X: Any) -> bytes:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(X, np.float32).tobytes()
