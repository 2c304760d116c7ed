"""What a folder's config.json says of how its weights are quantised."""

from dataclasses import dataclass
from typing import Any

from pshard.errors import UserError

READ = ("gptq", "awq", "compressed-tensors", "modelopt", "modelopt_fp4", "fp8", "fbgemm_fp8")


@dataclass(frozen=True)
class Scheme:
    """How quantised weights of a folder are meant, where tensors do not say it themselves.

    method: `quant_method` of config.json; "" where it has none. symmetric: zero points of GPTQ are half the range.
    plus_one: they are stored less 1. ordered: columns lie in an order of their own (`desc_act`).
    """

    method: str = ""
    symmetric: bool = False
    plus_one: bool = True
    ordered: bool = False


def read_scheme(config: dict[str, Any], takes_mxfp4: bool, where: str) -> Scheme:
    """The scheme of a config.json. takes_mxfp4: the architecture's folders are published in MXFP4.

    Raises UserError that names a method or setting that is not read.
    """
    given = config.get("quantization_config")
    if not given:
        return Scheme()
    settings = given if isinstance(given, dict) else {}
    method = str(settings.get("quant_method", "unknown"))[:40]
    what = ""
    if method not in (("mxfp4",) if takes_mxfp4 else READ):
        what = f"quantised safetensors of this method are not supported (quant_method {method!r})"
    elif method == "awq" and str(settings.get("version", "gemm")).lower() != "gemm":
        what = f"AWQ of version {settings['version']!r} is not supported, only 'gemm' is"
    if what:
        raise UserError(f"{where}: {what}; use a GGUF file of the model, or another folder of it")
    ordered = method == "gptq" and _reorders(settings)
    return Scheme(method, settings.get("sym") is True, settings.get("checkpoint_format") != "gptq_v2", ordered)


def _reorders(settings: dict[str, Any]) -> bool:
    return bool(settings.get("desc_act")) and not settings.get("static_groups") and settings.get("group_size") != -1
