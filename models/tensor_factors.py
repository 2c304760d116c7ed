"""Factors that a GGUF file has beside its matrices of NVFP4: NAME.scale is what all of NAME.weight is multiplied by."""

from dataclasses import replace

import numpy as np

from pshard.models.stored import FETCH_AGAIN, StoredTensor

_FACTOR, _OF_INPUTS = ".scale", ".input_scale"  # the latter is for activations of 4 bits, which nothing here has


def attach_factors(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, matrices of NVFP4 with their factors: one, or one for each expert. Raises UserError for factors of
    another shape or type, and for ones that are no numbers. Those of other types stay tensors, but for ones of 1."""
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(_OF_INPUTS)}
    for name, tensor in stored.items():
        matrix = kept.get(name.removesuffix(_FACTOR) + ".weight")
        if not name.endswith(_FACTOR) or matrix is None:
            continue
        if matrix.qtype == "NVFP4":
            kept[matrix.name] = replace(matrix, factors=_read_factors(tensor, matrix))
            del kept[name]
        elif tensor.shape == (1,) and tensor.qtype == "F32" and _read_factors(tensor, matrix) == (1.0,):
            del kept[name]
    return kept


def _read_factors(tensor: StoredTensor, matrix: StoredTensor) -> tuple[float, ...]:
    whole = (1,), *(((matrix.shape[0],),) if len(matrix.shape) == 3 else ())
    if tensor.shape not in whole or tensor.qtype != "F32":
        wanted = " or ".join(str(list(shape)) for shape in whole)
        what = f"is {tensor.qtype} of shape {list(tensor.shape)}, and factors of {matrix.name} are F32 of {wanted}"
        tensor.fail(what, FETCH_AGAIN)
    factors = tensor.read().view("<f4")
    if not np.isfinite(factors).all():
        tensor.fail("has a factor that is not a number: the file is damaged", FETCH_AGAIN)
    return tuple(float(factor) for factor in factors)
