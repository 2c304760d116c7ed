"""A tiny gpt-oss as the Hub has it: experts as blocks and scales of MXFP4."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from model_files import write_hf_folder
from safetensors.numpy import load_file, save_file


def publish_gpt_oss(folder: Path, seed: int = 0, **shape: Any) -> Any:
    """Write the folder, with random codes; returns the transformers model with the values that it decodes from them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = write_hf_folder(folder, "gpt_oss", shape=shape)
    tensors, rng, parameters = load_file(folder / "model.safetensors"), np.random.default_rng(seed), model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        n, cols, rows = tensors.pop(name).shape
        packed = {
            "blocks": rng.integers(0, 256, (n, rows, cols // 32, 16), dtype=np.uint8),
            "scales": rng.integers(118, 124, (n, rows, cols // 32), dtype=np.uint8),
        }
        tensors |= {f"{name}_{part}": values for part, values in packed.items()}
        decoded = convert_moe_packed_tensors(*map(torch.from_numpy, packed.values()), dtype=torch.float32)
        parameters[name].copy_(decoded)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model
