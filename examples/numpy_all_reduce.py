"""An all-reduce of NumPy arrays: in place, into another array, and while this rank works on.

usage: pleach run -n 4 python examples/numpy_all_reduce.py
"""

import numpy as np
import pleach


def main():
    with pleach.join() as group:
        ranks = group.world_size

        # Memory of the group: a call on it copies nothing.
        gradient = group.buffer(1_000_000, "float32")
        gradient[:] = group.rank
        group.all_reduce(gradient, "avg")
        assert np.all(gradient == (ranks - 1) / 2)

        # Any array will do, and the output may be another one.
        own = np.full(3, group.rank + 1, dtype=np.int64)
        total = group.all_reduce(own, "sum", out=np.empty_like(own))
        assert total.tolist() == [ranks * (ranks + 1) // 2] * 3 and own[0] == group.rank + 1

        # Under way while this rank computes.
        gradient[:] = 1
        pending = group.all_reduce(gradient, async_=True)
        norm = float(np.linalg.norm(np.arange(1000.0)))
        pending.wait(timeout=30)
        assert np.all(gradient == ranks)

        if group.rank == 0:
            print(f"{ranks} ranks over {group.fabric}: sums are right, and the norm is {norm:.1f}")


if __name__ == "__main__":
    main()
