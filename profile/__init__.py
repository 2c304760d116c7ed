"""Measures the machine with the runtime's own kernels and writes a MachineProfile."""

if __name__ == "profile":
    # The repository root came first on sys.path and this folder hid the standard library's `profile`, which
    # cProfile (and through it torch._dynamo) imports: hand the real module over.
    import importlib.util
    import sys
    import sysconfig
    from pathlib import Path

    _path = Path(sysconfig.get_path("stdlib")) / "profile.py"
    _spec = importlib.util.spec_from_file_location("profile", _path)
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["profile"] = _module
    _spec.loader.exec_module(_module)
