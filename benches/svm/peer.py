"""scikit-learn's side of `cargo bench --bench svm`.

usage: peer.py export FOLDER [MNIST]            data sets as files in LIBSVM's form
       peer.py fit FILE C GAMMA TOLERANCE       a line of JSON: what SVC, which is LIBSVM, takes
"""

import gzip
import json
import os
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_svmlight_file
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC


def write(folder, name, X, y):
    # The values that pleach works with, so that both solve one problem.
    X = X.astype(np.float32)
    with open(f"{folder}/{name}", "w") as file:
        for row, label in zip(X, y):
            pairs = " ".join(f"{at + 1}:{value!s}" for at, value in enumerate(row) if value)
            file.write(f"{label} {pairs}\n")


def export(folder, mnist=None):
    X, y = load_breast_cancer(return_X_y=True)
    write(folder, "breast_cancer", StandardScaler().fit_transform(X), 2 * y - 1)
    X, y = load_digits(return_X_y=True)
    write(folder, "digits", X / 16, 1 - 2 * (y % 2))
    if mnist:
        with gzip.open(f"{mnist}/t10k-images-idx3-ubyte.gz") as file:
            X = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / 255
        with gzip.open(f"{mnist}/t10k-labels-idx1-ubyte.gz") as file:
            y = np.frombuffer(file.read(), np.uint8, offset=8).astype(int)
        for count in (4000, 8000):
            write(folder, f"mnist-{count}", X[:count], 1 - 2 * (y[:count] % 2))


def fit(file, C, gamma, tolerance):
    X, y = load_svmlight_file(file)
    X = X.toarray()
    machine = SVC(C=float(C), gamma=float(gamma), tol=float(tolerance))
    began = time.perf_counter()
    machine.fit(X, y)
    train_s = time.perf_counter() - began
    vectors, coefficients = X[machine.support_], machine.dual_coef_[0]
    norms = (vectors * vectors).sum(axis=1)
    gram = np.exp(-machine.gamma * np.maximum(norms[:, None] + norms - 2 * vectors @ vectors.T, 0))
    found = {
        "train_s": train_s,
        "iterations": int(machine.n_iter_[0]),
        "support_vectors": len(machine.support_),
        "objective": 0.5 * coefficients @ gram @ coefficients - np.abs(coefficients).sum(),
        "intercept": machine.intercept_[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    {"export": export, "fit": fit}[sys.argv[1]](*sys.argv[2:])
