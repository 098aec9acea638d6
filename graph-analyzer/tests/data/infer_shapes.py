"""Writes what onnx.shape_inference says of models: a line 'model NAME', then for each value a line of
its name, its type and its dimensions (sizes or ?; or 'unknown'), with tabs between.

    python3 infer_shapes.py light/*.onnx > light/shapes.txt          # onnx 1.23.2
    python3 infer_shapes.py --wheel FOLDER > FILE                    # all models of the package

With --wheel the names are paths, and the models that the package's tests make are written to FOLDER.
"""

import pathlib
import sys
import warnings

import onnx
from onnx import shape_inference


def wheel_models(folder):
    """Paths of the models that the package brings, and of those that its tests make."""
    from onnx.backend.test.case.node import collect_testcases

    paths = sorted(pathlib.Path(onnx.__file__).parent.glob("backend/test/data/**/*.onnx"))
    folder.mkdir(parents=True, exist_ok=True)
    for case in collect_testcases(None):
        if case.model is not None:
            path = folder / f"{case.name}.onnx"
            onnx.save(case.model, path)
            paths.append(path)
    return paths


def write(path, name):
    try:
        model = shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    except Exception as error:  # a model that onnx itself refuses
        print(f"{path}: {error}", file=sys.stderr)
        return
    print(f"model {name}")
    results = {name for node in model.graph.node for name in node.output}
    for value in [*model.graph.value_info, *model.graph.output]:
        tensor = value.type.tensor_type
        if value.name not in results or not value.type.HasField("tensor_type"):
            continue
        dims = [str(dim.dim_value) if dim.HasField("dim_value") else "?" for dim in tensor.shape.dim]
        shape = " ".join(dims) if tensor.HasField("shape") else "unknown"
        print(f"{value.name}\t{tensor.elem_type}\t{shape}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    if sys.argv[1] == "--wheel":
        for path in wheel_models(pathlib.Path(sys.argv[2])):
            write(path, path)
    else:
        for argument in sorted(sys.argv[1:]):
            write(argument, pathlib.Path(argument).name)
